//! Uploading a log: our whole way (header scan, assembly, checked body, PUT) beside a bare PUT of the same bytes by the same
//! SDK. The bare one reads the same files in large pieces and sends no checksum.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aws_sdk_s3::primitives::{ByteStream, Length};
use log_format::key::KeySpace;
use tiering_core::fragment_assembly::{FragmentAssembly, FragmentPlan};
use tiering_runtime::buffer_pool::BufferPool;
use tiering_runtime::local_log::{FragmentBody, ScanRequest, Scanner};
use tiering_runtime::remote_tier::{PutBody, PutRequest, RemoteTier, S3RemoteTier};
use tiering_runtime::stats::Stats;
use tokio::runtime::Runtime;

use crate::bare::{self, Target, all};
use crate::corpus::Corpus;
use crate::other::Other;
use crate::row::{Cost, measure, print, print_paired};

const RUNS: usize = 5;
const CORPUS_BYTES: u64 = 1 << 30;
const CONCURRENCY: usize = 4;
const FRAGMENT_BYTES: u64 = 64 << 20;
const READ_BYTES: usize = 1 << 20;
const GIB: f64 = (1u64 << 30) as f64;

/// Runs all ways in turn.
pub fn run(
    directory: &Path,
    target: &Target,
    others: &[Other],
    data_bytes: u32,
) -> Result<(), Box<dyn std::error::Error>> {
    let corpus = Corpus {
        chunks: CORPUS_BYTES / u64::from(data_bytes),
        data_bytes,
        segment_bytes: 250_000_000,
    };
    let place = directory.join("upload");
    corpus.write(&place)?;
    let runtime = bare::runtime()?;
    let (mut ours, mut bare) = (Rates::default(), Rates::default());
    let mut others: Vec<(&Other, Rates)> = others
        .iter()
        .map(|other| (other, Rates::default()))
        .collect();
    for run in 0..=RUNS {
        let costs = [
            upload_bare(&runtime, &place, target)?,
            upload_ours(&runtime, &place, corpus, target)?,
        ];
        let other_costs: Result<Vec<Cost>, _> =
            others.iter().map(|(other, _)| other.run(&place)).collect();
        let other_costs = other_costs?;
        // The first round warms up: page cache, programs, the endpoint.
        if run > 0 {
            let [bare_cost, our_cost] = costs;
            bare.add(corpus, bare_cost);
            ours.add(corpus, our_cost);
            for ((_, rates), cost) in others.iter_mut().zip(other_costs) {
                rates.add(corpus, cost);
            }
        }
    }
    let Target { name, .. } = target;
    print(&format!("bare PUT, {name}"), "MB/s", &bare.throughput, None);
    print(&format!("bare PUT, {name}, CPU"), "s/GiB", &bare.cpu, None);
    let rows = |what: &str, rates: &Rates, against: &str, base: &Rates| {
        let row = format!("{what}, {name}");
        print_paired(&row, "MB/s", &rates.throughput, against, &base.throughput);
        let row = format!("{what}, {name}, CPU");
        print_paired(&row, "s/GiB", &rates.cpu, against, &base.cpu);
    };
    rows("upload", &ours, "bare PUT, same SDK", &bare);
    for (other, rates) in &others {
        print(
            &format!("{}, {name}", other.name),
            "MB/s",
            &rates.throughput,
            None,
        );
        print(
            &format!("{}, {name}, CPU", other.name),
            "s/GiB",
            &rates.cpu,
            None,
        );
        rows(
            &format!("upload beside {}", other.name),
            &ours,
            &other.name,
            rates,
        );
    }
    std::fs::remove_dir_all(&place)?;
    Ok(())
}

#[derive(Default)]
struct Rates {
    throughput: Vec<f64>,
    cpu: Vec<f64>,
}

impl Rates {
    fn add(&mut self, corpus: Corpus, cost: Cost) {
        let bytes = corpus.bytes() as f64;
        self.throughput.push(bytes / cost.wall.as_secs_f64() / 1e6);
        self.cpu.push(cost.cpu.as_secs_f64() / (bytes / GIB));
    }
}

fn upload_ours(
    runtime: &Runtime,
    place: &Path,
    corpus: Corpus,
    target: &Target,
) -> Result<Cost, String> {
    let tier = Arc::new(S3RemoteTier::new(&target.config()));
    let keys = KeySpace::new("bench");
    let pool = Arc::new(BufferPool::new());
    let directory: Arc<Path> = Arc::from(place);
    let (outcome, cost) = measure(|| {
        let plans = plans(place, corpus, &pool)?;
        let puts: Vec<_> = plans
            .into_iter()
            .enumerate()
            .map(|(number, plan)| {
                let request = PutRequest {
                    key: keys.fragment("ours", plan.first_offset, number as u32),
                    crc32: plan.object_crc(),
                    body: PutBody::Source(Arc::new(FragmentBody::new(
                        Arc::clone(&directory),
                        Arc::new(plan),
                        Arc::clone(&pool),
                    ))),
                    metadata: Vec::new(),
                };
                let tier = Arc::clone(&tier);
                async move { tier.put(request).await.map_err(|error| error.to_string()) }
            })
            .collect();
        all(runtime, puts.into_iter(), CONCURRENCY)
    });
    outcome.map(|_| cost)
}

fn plans(
    place: &Path,
    corpus: Corpus,
    pool: &Arc<BufferPool>,
) -> Result<Vec<FragmentPlan>, String> {
    let mut scanner = Scanner::new(
        place.to_path_buf(),
        Arc::clone(pool),
        Arc::new(Stats::default()),
    );
    let (mut plans, mut assembly, mut from_offset) = (Vec::new(), FragmentAssembly::new(), 0);
    while from_offset < corpus.chunks {
        let batch = scanner.scan(&ScanRequest {
            from_offset,
            front_timestamp_ms: None,
            witness: None,
            up_to_chunk_id: corpus.chunks - 1,
            max_chunks: 16_384,
            max_bytes: FRAGMENT_BYTES,
        });
        if batch.chunks.is_empty() {
            return Err(format!(
                "the scan stopped at {from_offset}: {:?}",
                batch.end
            ));
        }
        for chunk in &batch.chunks {
            if assembly.payload_bytes() >= FRAGMENT_BYTES {
                plans.extend(assembly.cut());
            }
            assembly.add(chunk).map_err(|error| error.to_string())?;
        }
        from_offset += batch.chunks.len() as u64;
    }
    plans.extend(assembly.cut());
    Ok(plans)
}

fn upload_bare(runtime: &Runtime, place: &Path, target: &Target) -> Result<Cost, String> {
    let client = target.client()?;
    let mut pieces = Vec::new();
    for entry in std::fs::read_dir(place).map_err(|error| error.to_string())? {
        let path: PathBuf = entry.map_err(|error| error.to_string())?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "segment")
        {
            let size = path.metadata().map_err(|error| error.to_string())?.len();
            pieces.extend(
                (0..size)
                    .step_by(FRAGMENT_BYTES as usize)
                    .map(|at| (path.clone(), at, FRAGMENT_BYTES.min(size - at))),
            );
        }
    }
    let (outcome, cost) = measure(|| {
        let puts: Vec<_> = pieces
            .into_iter()
            .enumerate()
            .map(|(number, (path, at, size))| {
                let (client, bucket) = (client.clone(), target.bucket.clone());
                async move {
                    let body = ByteStream::read_from()
                        .path(path)
                        .offset(at)
                        .length(Length::Exact(size))
                        .buffer_size(READ_BYTES)
                        .build()
                        .await
                        .map_err(|error| error.to_string())?;
                    let put = client
                        .put_object()
                        .bucket(bucket)
                        .key(format!("bench/bare/{number}"))
                        .body(body);
                    put.customize()
                        .disable_payload_signing()
                        .send()
                        .await
                        .map_err(|error| format!("{error:?}"))?;
                    Ok(())
                }
            })
            .collect();
        all(runtime, puts.into_iter(), CONCURRENCY)
    });
    outcome.map(|_| cost)
}

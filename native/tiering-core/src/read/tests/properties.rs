use bytes::Bytes;
use log_format::chunk::HEADER_BYTES;
use log_format::crc::crc32;
use log_format::manifest::Kind;
use proptest::prelude::*;

use super::world::*;
use crate::failure::Failure;
use crate::read::*;

/// Decisions of the world, from one seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % bound.max(1)
    }

    fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

fn layouts() -> impl Strategy<Value = Vec<Vec<ChunkSpec>>> {
    let chunk = (
        1_u32..20,
        prop_oneof![8 => 0_usize..300, 1 => 300_usize..3000],
    );
    prop::collection::vec(prop::collection::vec(chunk, 1..12), 1..8)
}

fn settings() -> impl Strategy<Value = Settings> {
    (
        64_u64..1500,
        64_u64..5000,
        64_u64..400,
        1_usize..6,
        1_usize..9,
        1_u64..200,
    )
        .prop_map(
            |(
                read_request_bytes,
                read_ahead_bytes,
                first_request_bytes,
                max_depth,
                max_ready_chunks,
                block_bytes,
            )| {
                Settings {
                    read_request_bytes,
                    read_ahead_bytes,
                    first_request_bytes,
                    max_depth,
                    max_ready_chunks,
                    block_bytes,
                    ..Settings::default()
                }
                .sanitized()
            },
        )
}

/// Answers in any order, with faults; consumes now and then; has to give everything back now and then. Returns what the consumer saw last.
fn run_by_chance(
    run: &mut Run,
    chance: &mut Chance,
    fault_percent: usize,
    flips: usize,
) -> ReadOutcome {
    let mut flips_left = flips;
    for _ in 0..20_000 {
        match chance.below(4) {
            0 => {
                for _ in 0..=chance.below(3) {
                    match run.queue.take(u64::MAX) {
                        ReadOutcome::Chunk { bytes, .. } => {
                            run.delivered.push_back(bytes.to_bytes())
                        }
                        ReadOutcome::Wait => {
                            run.report_consumed();
                            run.ask();
                            break;
                        }
                        outcome => return outcome,
                    }
                }
                run.report_consumed();
            }
            1 if chance.percent(10) => {
                let wanted = chance.percent(50);
                run.take_back(wanted);
            }
            _ if !run.requests.is_empty() => {
                let mut request = run.requests[chance.below(run.requests.len())].clone();
                let length = request.end.saturating_sub(request.start);
                if request.what == What::Range && length > 1 && chance.percent(40) {
                    // In parts, of which what came stays whatever becomes of the rest.
                    let available = run.truth(&request).map_or(0, |bytes| bytes.len());
                    if available > 1 {
                        let part = 1 + chance.below(available - 1) as u64;
                        run.answer_in_part(&request, part);
                        // It may have ended the reader, or the request.
                        match run.requests.iter().find(|other| other.id == request.id) {
                            Some(rest) => request = rest.clone(),
                            None => continue,
                        }
                    }
                }
                let truth = run.truth(&request);
                let outcome = match truth {
                    Ok(bytes)
                        if request.what == What::Range && flips_left > 0 && chance.percent(20) =>
                    {
                        let mut bytes = bytes.to_vec();
                        let at = chance.below(bytes.len());
                        // A chunk's CRC covers its data only.
                        if run
                            .world
                            .is_data(request.object.0, request.start + at as u64)
                        {
                            flips_left -= 1;
                            bytes[at] ^= 1 << chance.below(8);
                        }
                        Ok(Bytes::from(bytes))
                    }
                    Ok(bytes) if chance.percent(fault_percent) => match chance.below(5) {
                        4 => Err(Failure::NotFound("404, for now".to_owned())),
                        0 => Err(Failure::Transient("500".to_owned())),
                        1 => Err(Failure::Stalled("403".to_owned())),
                        2 if request.what == What::Range => {
                            Ok(bytes.slice(..chance.below(bytes.len())))
                        }
                        _ => Ok(Bytes::new()),
                    },
                    truth => truth,
                };
                // An empty index or group is damage, which is borne once only; here everything comes right in the end.
                let outcome = match outcome {
                    Ok(bytes) if bytes.is_empty() && request.what != What::Range => {
                        Err(Failure::Transient("empty".to_owned()))
                    }
                    outcome => outcome,
                };
                run.answer(&request, outcome);
            }
            _ => {
                // Time passes only as far as faults make the machine wait: deadlines are not the subject here.
                if let Some(due_ms) = run.reader.poll_timeout()
                    && due_ms < run.now_ms + 20_000
                {
                    run.now_ms = run.now_ms.max(due_ms);
                    run.handle(Event::Tick);
                }
            }
        }
    }
    panic!("the reader does not end: {:?}", run.reader);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_arrives_once_and_in_order(
        layout in layouts(),
        settings in settings(),
        seed in any::<u64>(),
        groups in 0_usize..4,
        fault_percent in prop_oneof![Just(0_usize), Just(20)],
        // One wrong byte is borne wherever it is; a second one could be in the same chunk.
        flips in 0_usize..2,
    ) {
        let mut world = World::new(1000, &layout);
        if groups > 0 {
            world.rebalance(Kind::Group, groups.min(layout.len()));
        }
        if groups > 1 {
            world.rebalance(Kind::KiloGroup, 1);
        }
        let mut chance = Chance(seed);
        let next_offset = world.root().next_offset;
        let range = usize::try_from(next_offset - 1000).expect("small");
        let offset = 1000 + chance.below(range) as u64;
        let expected = world.chunks_from(offset);
        let largest = world.chunks.iter().map(|chunk| chunk.bytes.len() as u64).max().expect("some");

        let mut run = Run::new(world, settings, Start::Offset(offset));
        let outcome = run_by_chance(&mut run, &mut chance, fault_percent, flips);
        prop_assert_eq!(outcome, ReadOutcome::Local { next_offset });
        prop_assert_eq!(run.delivered(), expected);
        let bound = settings.read_ahead_bytes + settings.first_request_bytes + 2 * largest;
        prop_assert!(run.max_outstanding <= bound, "{} of {} bytes", run.max_outstanding, bound);
        if fault_percent == 0 {
            let Counters { range_retries, chunk_crc_mismatches, .. } = run.reader.counters();
            prop_assert_eq!(range_retries, chunk_crc_mismatches, "nothing else went wrong");
        }
    }

    #[test]
    fn damaged_bytes_never_panic_and_never_reach_the_consumer(
        layout in layouts(),
        settings in settings(),
        seed in any::<u64>(),
        damage in 1_usize..6,
        groups in any::<bool>(),
    ) {
        let mut world = World::new(0, &layout);
        if groups {
            world.rebalance(Kind::Group, layout.len());
        }
        let mut chance = Chance(seed);
        for _ in 0..damage {
            let number = chance.below(world.objects.len());
            let object = world.objects.values_mut().nth(number).expect("there");
            let mut bytes = object.to_vec();
            match chance.below(5) {
                0 => bytes.truncate(chance.below(bytes.len())),
                1 => bytes.extend(vec![0xff; chance.below(200)]),
                2 => {
                    let from = chance.below(bytes.len());
                    bytes[from..].fill(0xff);
                }
                _ => {
                    let at = chance.below(bytes.len());
                    bytes[at] ^= 1 << chance.below(8);
                }
            }
            if bytes.is_empty() {
                bytes.push(0);
            }
            *object = Bytes::from(bytes);
        }
        let range = usize::try_from(world.root().next_offset).expect("small");
        let offset = chance.below(range) as u64;
        let mut run = Run::new(world, settings, Start::Offset(offset));
        let outcome = run.run_to_the_end();
        let ended = matches!(outcome, ReadOutcome::Local { .. } | ReadOutcome::Failed { .. });
        prop_assert!(ended);
        let is_bug = matches!(outcome, ReadOutcome::Failed { kind: FailureKind::Bug, .. });
        prop_assert!(!is_bug, "{:?}", outcome);
        let mut expected_id = None;
        for bytes in run.delivered() {
            let header = header_of(&bytes);
            let start = HEADER_BYTES + usize::from(header.filter_bytes);
            let end = start + usize::try_from(header.data_bytes).expect("small");
            prop_assert_eq!(crc32(&bytes[start..end]), header.data_crc);
            prop_assert!(expected_id.is_none_or(|id| id == header.chunk_id));
            expected_id = header.next_offset();
        }
    }

    #[test]
    fn answers_of_any_kind_in_any_order_never_panic(
        layout in layouts(),
        settings in settings(),
        seed in any::<u64>(),
        junk in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let mut chance = Chance(seed);
        let mut run = Run::new(World::new(0, &layout), settings, Start::Timestamp(chance.below(100) as i64));
        for _ in 0..300 {
            if run.finish.is_some() {
                break;
            }
            let length = chance.below(junk.len() + 1);
            let outcome = match chance.below(8) {
                0 => Err(Failure::NotFound(String::new())),
                1 => Err(Failure::Corrupt(String::new())),
                2 => Err(Failure::Transient(String::new())),
                _ => Ok(Bytes::copy_from_slice(&junk[..length])),
            };
            match run.requests.first().cloned() {
                Some(request) if chance.percent(60) => {
                    let outcome = if chance.percent(50) { run.truth(&request) } else { outcome };
                    run.answer(&request, outcome);
                }
                Some(_) | None if chance.percent(50) => {
                    run.now_ms += chance.below(3000) as u64;
                    run.handle(Event::Tick);
                }
                Some(_) | None => {
                    let id = chance.below(40) as u64;
                    if run.requests.iter().all(|request| request.id != id) {
                        run.handle(Event::Fetched { id, outcome });
                    }
                    run.consume();
                }
            }
        }
    }
}

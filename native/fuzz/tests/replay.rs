//! The committed corpus, and every cut and flipped bit of it, against the targets: what `make fuzz` found once stays found.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

fn corpus(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name)
}

fn inputs(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let mut inputs: Vec<_> = std::fs::read_dir(corpus(name))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect();
    inputs.sort();
    inputs
}

fn replay(name: &str) {
    let target = fuzz::TARGETS
        .iter()
        .find(|target| target.name == name)
        .unwrap();
    let inputs = inputs(name);
    assert!(!inputs.is_empty(), "{name} has a corpus");
    for (path, bytes) in inputs {
        println!("{}", path.display());
        (target.run)(&bytes);
        for cut in 0..bytes.len() {
            (target.run)(&bytes[..cut]);
            let mut flipped = bytes.clone();
            flipped[cut] ^= 1 << (cut % 8);
            (target.run)(&flipped);
            flipped[cut] = 0xff;
            (target.run)(&flipped);
        }
    }
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(#[test] fn $name() { replay(stringify!($name)); })*

        #[test]
        fn every_target_is_replayed_and_every_corpus_has_a_target() {
            let names: Vec<_> = fuzz::TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
            let mut folders: Vec<_> = std::fs::read_dir(corpus(""))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            folders.sort();
            let mut names = names.clone();
            names.sort_unstable();
            assert_eq!(folders, names);
        }
    };
}

replays! {
    chunk_header chunk_entries index_record segment_name fragment_header fragment_index root group edit key checksum_text
    read
}

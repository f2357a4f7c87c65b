//! libFuzzer's process: feeds the target that `FUZZ_TARGET` names. Built and started by scripts/fuzz.
#![no_main]
#![allow(unsafe_code)] // the macro below gives libFuzzer its C entry point

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

static RUN: OnceLock<fn(&[u8])> = OnceLock::new();

fuzz_target!(
    init: {
        let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
        let target = fuzz::TARGETS.iter().find(|target| target.name == name);
        let run = target.map_or_else(|| std::process::exit(2), |target| target.run);
        let _ = RUN.set(run);
    },
    |bytes: &[u8]| {
        if let Some(run) = RUN.get() {
            run(bytes);
        }
    }
);

//! A program of others that uploads the same segment files.
//!
//! Owns how it is run and what it used. Does not own what it does.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::row::{Cost, children_cpu_time, measure};

/// One program.
#[derive(Debug, Clone)]
pub struct Other {
    /// Name for the rows.
    pub name: String,
    command: String,
}

impl Other {
    /// From `NAME=COMMAND`.
    pub fn parse(text: &str) -> Option<Self> {
        let (name, command) = text.split_once('=')?;
        Some(Self {
            name: name.to_owned(),
            command: command.to_owned(),
        })
    }

    /// Runs it over the files in `place` (BENCH_DIR). What it used is what it says, as two numbers of microseconds (wall and CPU)
    /// on its last line; one that says nothing is measured as a process, its start included.
    pub fn run(&self, place: &Path) -> Result<Cost, String> {
        let cpu = children_cpu_time();
        let (output, cost) = measure(|| {
            Command::new("sh")
                .args(["-c", &self.command])
                .env("BENCH_DIR", place)
                .stdin(Stdio::null())
                .stderr(Stdio::piped())
                .output()
        });
        let output = output.map_err(|error| format!("{}: {error}", self.name))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{}: {}: {text}", self.name, output.status));
        }
        let said = String::from_utf8_lossy(&output.stdout);
        Ok(said_cost(&said).unwrap_or(Cost {
            wall: cost.wall,
            cpu: children_cpu_time().saturating_sub(cpu),
        }))
    }
}

fn said_cost(text: &str) -> Option<Cost> {
    let (wall, cpu) = text.lines().last()?.trim().split_once(' ')?;
    Some(Cost {
        wall: Duration::from_micros(wall.parse().ok()?),
        cpu: Duration::from_micros(cpu.parse().ok()?),
    })
}

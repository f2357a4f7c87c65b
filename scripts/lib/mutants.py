#!/usr/bin/env python3
"""Deliberate mistakes, as changes of a copy of the core.

Usage: mutants.py check            each mistake still applies to the sources, alone and with all others
       mutants.py apply NATIVE     makes all of them in NATIVE, a copy of native/, each behind a switch

native/sim/mutants/NAME.mutant holds one mistake: a line that says what is wrong, then for each place
    === FILE below native/
    the program, a text that is in the file exactly once
    >>>>
    the same place with the mistake behind `mutant!(NAME)`
"""
import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
FOLDER = TOP / "native/sim/mutants"
CORE = pathlib.Path("tiering-core/src")


def mistakes():
    """[(name, what is wrong, [(file, program, mistake)])], in the order in which they are applied."""
    found = []
    for path in sorted(FOLDER.glob("*.mutant")):
        head, *places = re.split(r"^=== ", path.read_text(), flags=re.M)
        changes = []
        for place in places:
            file, rest = place.split("\n", 1)
            program, mistake = rest.split("\n>>>>\n")
            changes.append((file, program, mistake.rstrip("\n")))
        if not head.startswith("# ") or not changes:
            sys.exit(f"mutants: {path.name} has no head or no place")
        found.append((path.stem, head[2:].strip(), changes))
    return found


def change(native, texts, name, changes):
    """Makes one mistake in the texts; complains about a place that is not there exactly once."""
    for file, program, mistake in changes:
        text = texts.setdefault(file, (native / file).read_text())
        if (count := text.count(program)) != 1:
            return f"mutants: {name} no longer applies: its program is in {file} {count} times"
        if f"mutant!({name})" not in mistake:
            return f"mutants: {name} has no switch of its name in {file}"
        texts[file] = text.replace(program, mistake)
    return None


def all_in(native):
    texts, faults = {}, []
    for name, _, changes in mistakes():
        faults += filter(None, [change(native, {}, name, changes)])
    for name, _, changes in mistakes() if not faults else []:
        faults += filter(None, [change(native, texts, name, changes)])
    if any("mutant" in path.read_text() for path in (native / CORE).rglob("*.rs")):
        faults.append("mutants: the core's sources hold a mistake themselves")
    return texts, faults


def switches():
    """The core's module of switches, and the core's names for them."""
    arms = "".join(f"    /// {what}\n    {name},\n" for name, what, _ in mistakes())
    names = "".join(f"Mutant::{name}, " for name, _, _ in mistakes())
    return f"""//! Deliberate mistakes, one of which may be active in the process.

use std::sync::atomic::{{AtomicUsize, Ordering}};

/// Number of the active one plus one; 0 = none.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

/// The mistakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {{
{arms}}}

/// All of them.
pub const ALL: &[Mutant] = &[{names}];

/// Makes the mistake from now on; `None`: none.
pub fn activate(mutant: Option<Mutant>) {{
    ACTIVE.store(mutant.map_or(0, |mutant| mutant as usize + 1), Ordering::SeqCst);
}}

/// Whether the mistake is to be made.
#[must_use]
pub fn is_active(mutant: Mutant) -> bool {{
    ACTIVE.load(Ordering::Relaxed) == mutant as usize + 1
}}

macro_rules! mutant {{
    ($name:ident) => {{
        $crate::mutants::is_active($crate::mutants::Mutant::$name)
    }};
}}
"""


def main(arguments):
    match arguments:
        case ["check"]:
            _, faults = all_in(TOP / "native")
            print("\n".join(faults) or f"mutants: all {len(mistakes())} apply")
            return bool(faults)
        case ["apply", folder]:
            native = pathlib.Path(folder)
            texts, faults = all_in(native)
            if faults:
                sys.exit("\n".join(faults))
            for file, text in texts.items():
                (native / file).write_text(text)
            (native / CORE / "mutants.rs").write_text(switches())
            library = native / CORE / "lib.rs"
            text = library.read_text()
            first = re.search(r"^(pub )?mod ", text, flags=re.M).start()
            library.write_text(text[:first] + "#[macro_use]\npub mod mutants;\n" + text[first:])
            runner = native / "sim/src/bin/mutants.rs"
            runner.parent.mkdir(exist_ok=True)
            runner.write_text((FOLDER / "runner.rs").read_text())
            return False
        case _:
            print(__doc__)
            return True


sys.exit(main(sys.argv[1:]))

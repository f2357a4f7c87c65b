//! The place of our threads behind the broker's.
//!
//! What we do is seldom urgent and comes in bursts: a fragment of 64 MB keeps a core busy for tens of milliseconds, and a
//! publisher whose confirmation falls into them would notice. So where both want a core the broker's threads get nearly all of
//! it; where a core is free it makes no difference.

/// Lowest priority that there is.
const NICENESS_MAX: i32 = 19;

/// What a thread of ours does when it starts: goes so many steps behind the thread that calls this now. Nothing comes of it
/// where the system lets no thread have a priority of its own.
pub(crate) fn behind(steps: u8) -> impl Fn() + Send + Sync + 'static {
    // Taken here: our threads start each other, and would go further back each time.
    let niceness = (own() + i32::from(steps)).min(NICENESS_MAX);
    move || {
        if steps > 0 {
            set_own(niceness);
        }
    }
}

/// That of the calling thread.
#[cfg(target_os = "linux")]
fn own() -> i32 {
    rustix::process::getpriority_process(None).unwrap_or_default()
}

/// Going back is always allowed.
#[cfg(target_os = "linux")]
fn set_own(niceness: i32) {
    let _ = rustix::process::setpriority_process(None, niceness);
}

#[cfg(not(target_os = "linux"))]
const fn own() -> i32 {
    0
}

#[cfg(not(target_os = "linux"))]
const fn set_own(_niceness: i32) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn in_thread_of(start: impl Fn() + Send + Sync + 'static) -> Option<i32> {
        let thread = std::thread::spawn(move || {
            start();
            own()
        });
        thread.join().ok()
    }

    #[test]
    fn threads_go_behind_the_one_that_starts_the_runtime_and_no_further() {
        let before = own();
        let first = behind(3);
        let expected = Some((before + 3).min(NICENESS_MAX));
        assert_eq!(in_thread_of(first), expected);
        let nested = behind(3);
        let seen = std::thread::spawn(move || {
            nested();
            // A thread of ours starts another one.
            in_thread_of(nested)
        });
        assert_eq!(seen.join().expect("no panic"), expected);
        assert_eq!(in_thread_of(behind(0)), Some(before));
        assert_eq!(own(), before, "only the thread itself");
    }
}

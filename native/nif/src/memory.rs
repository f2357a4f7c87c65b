//! How much memory the library holds: what Erlang's own accounts cannot say.
//!
//! Owns the count. Memory comes from the system's allocator, as it would without this.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering};

static IN_USE_BYTES: AtomicI64 = AtomicI64::new(0);

#[global_allocator]
static COUNTING: Counting = Counting;

/// Bytes that are allocated now, as asked for: without the allocator's own overhead, and without threads' stacks.
pub(crate) fn in_use_bytes() -> i64 {
    IN_USE_BYTES.load(Ordering::Relaxed)
}

/// The system's allocator, counted.
struct Counting;

/// A layout is at most `isize::MAX` bytes.
fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

// SAFETY: every call goes to the system's allocator as it came; counting allocates nothing and cannot fail.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the one that is asked for.
        let block = unsafe { System.alloc(layout) };
        if !block.is_null() {
            IN_USE_BYTES.fetch_add(signed(layout.size()), Ordering::Relaxed);
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above. Not by way of `alloc`: the system may have zeroed pages at hand.
        let block = unsafe { System.alloc_zeroed(layout) };
        if !block.is_null() {
            IN_USE_BYTES.fetch_add(signed(layout.size()), Ordering::Relaxed);
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) };
        IN_USE_BYTES.fetch_sub(signed(layout.size()), Ordering::Relaxed);
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { System.realloc(block, layout, new_size) };
        if !moved.is_null() {
            let grown = signed(new_size) - signed(layout.size());
            IN_USE_BYTES.fetch_add(grown, Ordering::Relaxed);
        }
        moved
    }
}

//! Every decision of tiered storage, without input and output.
//!
//! Owns: when to scan, cut, upload, persist, retain and recover ([`upload`]); how chunks become fragments
//! ([`fragment_assembly`]); what is done to a manifest ([`manifest`]); where a reader starts ([`route`]); how uploads are
//! paced ([`token_bucket`]); who gets memory to read into ([`read_budget`]); what time it is ([`trusted_time`]); what a
//! failed request means ([`failure`]). Does not own:
//! tasks, files, sockets, clocks, chance. Time and seeds come in as arguments, work goes out as effects, and what became of it
//! comes back as events.

mod chance;
pub mod failure;
pub mod fragment_assembly;
pub mod manifest;
pub mod read;
pub mod read_budget;
pub mod route;
pub mod token_bucket;
pub mod trusted_time;
pub mod upload;

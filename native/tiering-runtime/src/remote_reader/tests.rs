//! Tests of the driver over a store in memory.

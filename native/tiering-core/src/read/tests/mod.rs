mod faults;
mod placing;
mod properties;
mod rate;
mod reading;
mod regressions;
mod world;

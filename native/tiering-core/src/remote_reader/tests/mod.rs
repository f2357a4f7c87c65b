mod faults;
mod placing;
mod properties;
mod reading;
mod regressions;
mod world;

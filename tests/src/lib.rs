//! What the tests of this crate share: ranks that are threads ([`world`]), ranks that are processes and can be killed
//! ([`process`]), the faults of a rank ([`fault`]), backends for tests ([`hooked`], [`registered`], [`staged`]), the
//! paths of the simulator and of the profiler plug-in ([`simulator`]), jobs that exist only as records ([`generator`]),
//! a hunt for false verdicts on simulated jobs ([`hunt`]), the matrix of how jobs of real processes live and end
//! ([`lives`]), what a process uses ([`usage`]), and a median ([`statistics`]).
#![forbid(unsafe_code)]

pub mod fault;
pub mod generator;
pub mod hooked;
pub mod hunt;
pub mod lives;
pub mod process;
pub mod registered;
pub mod simulator;
pub mod staged;
pub mod statistics;
pub mod usage;
pub mod world;

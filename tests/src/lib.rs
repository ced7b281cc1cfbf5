//! What the tests of this crate share: ranks that are threads ([`world`]), ranks that are processes and can be killed
//! ([`process`]), the faults of a rank ([`fault`]), a
//! backend with hooks for tests ([`hooked`]), jobs that exist only as records ([`generator`]), and the matrix of
//! how jobs of real processes live and end ([`lives`]).
#![forbid(unsafe_code)]

pub mod fault;
pub mod generator;
pub mod hooked;
pub mod lives;
pub mod process;
pub mod registered;
pub mod simulator;
pub mod staged;
pub mod statistics;
pub mod usage;
pub mod world;

//! Sources on this node: rings, and the processes of ranks.

mod choice;
mod dump_pipes;
mod local;
mod processes;
mod rank_jobs;
mod ring_directory;
mod rings;
mod surroundings;
mod threads;

pub use choice::JobChoice;
pub use dump_pipes::{DumpOfProcess, PIPE_VARIABLE, PipeDumps, dump_beginnings};
pub use local::{LocalDumps, LocalSource};
pub use processes::{ProcessSource, ProcessStacks, RankProcess};
pub use rank_jobs::{Program, RankJob};
pub use ring_directory::ring_directory;
pub use rings::RingSource;
pub use surroundings::{Fact, RingSurroundings, Surroundings};
pub use threads::RingThreads;

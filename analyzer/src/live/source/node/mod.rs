//! Sources on this node: rings, and the processes of ranks.

mod choice;
mod dump_pipes;
mod local;
mod process_facts;
mod processes;
mod rank_jobs;
mod ring_directory;
mod rings;
mod threads;

pub use choice::JobChoice;
pub use dump_pipes::{DumpOfProcess, PIPE_VARIABLE, PipeDumps, dump_beginnings};
pub use local::{LocalDumps, LocalSource};
pub use process_facts::{Fact, ProcessFacts, RingProcessFacts};
pub use processes::{ProcessSource, ProcessStacks, RankProcess};
pub use rank_jobs::{Program, RankJob};
pub use ring_directory::ring_directory;
pub use rings::RingSource;
pub use threads::RingThreads;

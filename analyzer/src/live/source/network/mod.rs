//! Sources over the network: the endpoints of ranks, the job's store, servers of PyTorch and NCCL, collectors.

mod address;
mod collector;
mod endpoints;
mod questions;
mod ras;
mod records;
mod sources;
mod store;
mod store_ranks;
mod worker_servers;

pub use address::{AddressError, HostPort, HttpAddress};
pub use collector::CollectorSource;
pub use endpoints::{EndpointDumps, EndpointSource};
pub use ras::{RAS_ADDRESS, RasSource};
pub use records::{RECORDS_SCHEMA, RecordHead, RecordsFollower, RecordsHead, RecordsQuestion};
pub use sources::NetworkSources;
pub use store::{hosts_in_store, raise_exception_dump};
pub use store_ranks::{StoreDumps, StoreSource};
pub use worker_servers::{RankStacksText, WorkerAddress, WorkerServerDumps, WorkerServerSource};

pub(super) use questions::ask_all;

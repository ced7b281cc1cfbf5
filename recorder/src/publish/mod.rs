//! Records outside their process: dumps, ring files, endpoints and launch records; and the job's secret, by which
//! endpoints and the store know who may connect.

mod answer;
mod client;
#[cfg(feature = "endpoint")]
mod connections;
mod dialect;
mod dump_file;
// Invariant 1 of docs/ARCHITECTURE.md: only this feature brings an async runtime.
#[cfg(feature = "endpoint")]
mod endpoint;
mod follow;
#[cfg(feature = "endpoint")]
mod handlers;
mod http;
mod launch_record;
mod pickle;
#[cfg(feature = "endpoint")]
mod places;
mod retention;
mod ring_follower;
mod ring_reader;
mod secret;
#[cfg(feature = "endpoint")]
mod share;
mod store_proof;
mod threads;
#[cfg(feature = "tls")]
mod tls;
#[cfg(feature = "endpoint")]
mod wait_routes;
mod waits;

pub use crate::model::dump::{
    Dump, DumpGroup, FormatVersion, Identity, Recorder, ThreadInfo, UnreadableVersion,
};
pub use answer::{
    EndpointAddress, EndpointNotice, EndpointToken, GroupAnswer, PeerEndpoint, RankAnswer,
    WrittenDump,
};
pub use client::{DumpAnswer, EndpointClient};
pub use dialect::{Cause, DumpReader, ReadError, ReadProblem};
pub use dump_file::{DumpFileError, remove_abandoned_dumps, write_dump_file};
#[cfg(feature = "endpoint")]
pub use endpoint::{CONNECTION_TIME, Endpoint, Listen, MAX_CONNECTIONS};
pub use follow::{EndpointFollower, FollowedDump};
#[cfg(feature = "endpoint")]
pub use handlers::HandlerParameters;
pub use http::{AnswerBudget, HttpAnswer, HttpError, HttpRequest};
pub use launch_record::{LaunchRecord, LaunchSignal, LaunchedRank, RankEnd};
#[cfg(feature = "endpoint")]
pub use places::{Place, Places};
pub use retention::{KeptJobs, remove_jobs_beside, remove_jobs_beside_within};
pub use ring_follower::{RingFollower, RingPoll};
pub use ring_reader::{RingListing, RingReader, RingSummary, list_rings, remove_stale_rings};
pub use secret::Secret;
pub use store_proof::{STORE_REFUSAL, STORE_TAKES_TLS, StoreCaller, StoreChallenge, StoreOpCode};
pub use threads::{CodeAddress, OwnThread, own_threads};
#[cfg(feature = "tls")]
pub use tls::{Handshake, Tls, TlsError, TlsFiles, TlsSession, TlsStream};
pub use waits::{WaitStatistics, is_wait_name};

//! What reading files returns.

use super::ras::RasReport;
use rcomm_recorder::publish::Dump;
use rcomm_verdict::Problem;
use rcomm_verdict::logs::Log;

/// One rank's record, as read.
#[derive(Debug)]
pub struct LoadedDump {
    /// The record; its identity holds the rank, from the record itself or from the file's name.
    pub dump: Dump,
    /// Where it was: a path, with the member's name behind a colon if that is an archive.
    pub path: String,
    /// The newest entries are missing: the file ended too early, or held no list of them.
    pub cut: bool,
}

/// What was read, apart from the dumps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// What was wrong with files, in the order of their paths.
    pub problems: Vec<Problem>,
    /// Files looked at, members of archives included.
    pub files: usize,
    /// Records that were handed over; several can be of one rank.
    pub dumps: usize,
    /// What NCCL's RAS reports contain, by path, in the order of their paths.
    pub ras: Vec<(String, RasReport)>,
    /// What logs contain, in the order of their paths.
    pub logs: Vec<Log>,
}

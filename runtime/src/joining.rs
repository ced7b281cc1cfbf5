//! How a process joins its job: waits for the others, learns the secret.
//!
//! Who it is was settled before ([`Rendezvous`]); what it does afterwards is the world's.

use crate::config::{Config, RingDir};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rendezvous::Rendezvous;
use crate::secret::Secret;
use crate::store::Store;
use rcomm_recorder::model::Rank;
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig, Storage};
use std::time::SystemTime;

/// Waits until all ranks have come.
pub(crate) fn meet(notes: &dyn Store, place: &Rendezvous, deadline: Deadline) -> Result<()> {
    notes.set(&format!("here/{}", place.rank), b"1")?;
    let count = notes.add("here", 1)?;
    if count >= i64::from(place.world_size) {
        return notes.set("all here", b"1");
    }
    notes
        .wait(&["all here"], deadline.remaining())
        .map_err(|error| {
            if error.kind() != ErrorKind::Timeout {
                return error;
            }
            let absent = |rank: &Rank| !notes.check(&[&format!("here/{rank}")]).unwrap_or(false);
            let ranks: Vec<Rank> = (0..place.world_size).filter(absent).take(17).collect();
            let shown: Vec<String> = ranks.iter().take(16).map(Rank::to_string).collect();
            let more = if ranks.len() > 16 { " and more" } else { "" };
            Error::new(
                ErrorKind::Rendezvous,
                format!(
                    "not all {} ranks came in time: missing {}{more}",
                    place.world_size,
                    shown.join(", ")
                ),
            )
        })
}

/// The secret and the name of this run: rank 0 says.
pub(crate) fn agree(
    notes: &dyn Store,
    place: &Rendezvous,
    config: &Config,
    deadline: Deadline,
) -> Result<(Secret, String)> {
    if place.rank == 0 {
        let secret = match &config.secret {
            Some(secret) => secret.clone(),
            None => {
                let secret = Secret::generate()?;
                notes.set("secret", secret.as_bytes())?;
                secret
            }
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let run = now.map_or(0, |now| now.as_millis()).to_string();
        notes.set("run", run.as_bytes())?;
        return Ok((secret, run));
    }
    let run = notes.get("run", deadline.remaining())?;
    let run = String::from_utf8_lossy(&run).into_owned();
    if let Some(secret) = &config.secret {
        return Ok((secret.clone(), run));
    }
    if !notes.check(&["secret"])? {
        return Err(Error::new(
            ErrorKind::Rendezvous,
            "rank 0 was given a job secret and this rank was not: set RCOMM_JOB_SECRET on all ranks, \
             or on none",
        ));
    }
    let bytes = notes.get("secret", deadline.remaining())?;
    let bytes = <[u8; 32]>::try_from(bytes).map_err(|bytes| {
        Error::new(
            ErrorKind::Rendezvous,
            format!(
                "the job's secret in the store has {} bytes, not 32",
                bytes.len()
            ),
        )
    })?;
    Ok((Secret::from_bytes(bytes), run))
}

pub(crate) fn open_recorder(place: &Rendezvous, config: &Config) -> Result<FlightRecorder> {
    let recorder = RecorderConfig {
        placement: match &config.ring_dir {
            RingDir::Shared => Placement::Shared,
            RingDir::Dir(dir) => Placement::Dir(dir.clone()),
            RingDir::Memory => Placement::Memory,
        },
        attempt: place.attempt,
        entries: config.ring_entries,
        ..RecorderConfig::new(place.job.clone(), place.rank, place.world_size)
    };
    FlightRecorder::create(&recorder).map_err(|error| {
        Error::new(ErrorKind::Io, "cannot open the ring of the flight recorder").with_source(error)
    })
}

pub(crate) fn ring_place(recorder: &FlightRecorder) -> String {
    match recorder.storage() {
        Storage::File(path) => path.display().to_string(),
        Storage::Memory { why: None } => "in memory".to_owned(),
        Storage::Memory { why: Some(why) } => format!("in memory only, since {why}"),
    }
}

/// A directory name for this run, whatever is in the job's name.
pub(crate) fn run_name(job: &str, run: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let job: String = job
        .chars()
        .map(|c| if plain(c) { c } else { '_' })
        .take(64)
        .collect();
    format!("{}-{run}", job.trim_start_matches('.'))
}

//! How a process joins its job: waits for the others, learns the secret.
//!
//! Who it is was settled before ([`Rendezvous`]); what it does afterwards is the world's.

use crate::alarm::FLAG;
use crate::config::{Config, RingDir};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rendezvous::Rendezvous;
use crate::secret::Secret;
use crate::store::{Store, which_came};
use crate::tuning::Tuning;
use rcomm_recorder::model::Rank;
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig, Storage};
use std::time::{Duration, Instant, SystemTime};

/// Takes down PyTorch's flag if an earlier attempt of the job left it in the store, where an agent that
/// outlives its ranks serves it: this attempt would make dumps of nothing, and its own flag would be
/// overlooked. PyTorch's key knows no attempts.
///
/// Every rank calls it before it says that it has come, and looks at the flag only after all have: so no
/// flag of this attempt's own ranks is taken down.
pub(crate) fn forget_earlier_attempt(
    root: &dyn Store,
    notes: &dyn Store,
    place: &Rendezvous,
) -> Result<()> {
    if place.attempt > 0 && notes.add("flag seen to", 1)? == 1 && root.delete(FLAG)? {
        tracing::info!(
            attempt = place.attempt,
            "took down the dump flag that an earlier attempt left in the store"
        );
    }
    Ok(())
}

/// Waits until all ranks have come, and finds out whether all were given the same secret, or none.
///
/// Each leaves a fingerprint of its secret; the last to come compares them and tells everybody, so that
/// all ranks fail where one is wrong.
pub(crate) fn meet(
    notes: &dyn Store,
    place: &Rendezvous,
    config: &Config,
    deadline: Deadline,
) -> Result<()> {
    let own = config.secret.as_ref().map(|secret| {
        let tag = secret.derive("fingerprint").tag(&[place.job.as_bytes()]);
        tag.map(|byte| format!("{byte:02x}")).concat()
    });
    let own = own.unwrap_or_else(|| NO_SECRET.to_owned());
    notes.set(&here(place.rank), own.as_bytes())?;
    let count = notes.add("here", 1)?;
    if count >= i64::from(place.world_size) {
        let refusal = compare_secrets(notes, place.world_size, deadline)?;
        let verdict = refusal.as_deref().unwrap_or(YES);
        notes.compare_set(ALL_HERE, b"", verdict.as_bytes())?;
    }
    let verdict = match notes.get(ALL_HERE, deadline.remaining()) {
        // Whose time is over first says so to all, in the same words.
        Err(error) if error.kind() == ErrorKind::Timeout => {
            let absent = name_absent(notes, place);
            notes.compare_set(ALL_HERE, b"", absent.as_bytes())?
        }
        verdict => verdict?,
    };
    if verdict == YES.as_bytes() {
        return Ok(());
    }
    // The store goes with the rank that serves it: not before all who came know why.
    let heard = notes.add("refusal heard", 1)?;
    if heard >= notes.add("here", 0)? {
        notes.set("refusal heard by all", b"1")?;
    }
    if place.serves_store() {
        let _ = notes.wait(&["refusal heard by all"], config.status_wait);
    }
    Err(Error::new(
        ErrorKind::Rendezvous,
        String::from_utf8_lossy(&verdict),
    ))
}

/// What a rank leaves that was given no secret.
const NO_SECRET: &str = "none";
/// Below `rcomm/<attempt>` holds [`YES`], or why the job cannot start. Set once.
pub(crate) const ALL_HERE: &str = "all here";
const YES: &str = "yes";
/// Ranks that a message lists.
const MOST_RANKS: usize = 16;

fn here(rank: Rank) -> String {
    format!("here/{rank}")
}

/// What is wrong with the secrets that the ranks were given, if anything is.
fn compare_secrets(
    notes: &dyn Store,
    world_size: u32,
    deadline: Deadline,
) -> Result<Option<String>> {
    let keys: Vec<String> = (0..world_size).map(here).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let given = notes.multi_get(&keys, deadline.remaining())?;
    let Some(first) = given.first() else {
        return Ok(None);
    };
    let other = |(rank, given): (Rank, &Vec<u8>)| (given != first).then_some(rank);
    let others: Vec<Rank> = (0..).zip(&given).filter_map(other).collect();
    if others.is_empty() {
        return Ok(None);
    }
    let none = NO_SECRET.as_bytes();
    let others_have_none = others.iter().all(|&rank| given[rank as usize] == none);
    let (own, theirs) = match (first == none, others_have_none) {
        (true, _) => ("no job secret", "one"),
        (false, true) => ("a job secret", "none"),
        (false, false) => ("a job secret", "another"),
    };
    Ok(Some(format!(
        "rank 0 was given {own}, but {} {theirs}: set RCOMM_JOB_SECRET to the same on all ranks, or on \
         none",
        list(&others)
    )))
}

/// `rank 3`, or `ranks 1, 2 and 5 more`.
fn list(ranks: &[Rank]) -> String {
    let shown: Vec<String> = ranks.iter().take(MOST_RANKS).map(Rank::to_string).collect();
    let more = match ranks.len().saturating_sub(MOST_RANKS) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}{more}", shown.join(", "))
}

/// Why a wait for all ranks ended without those that did not come.
fn name_absent(notes: &dyn Store, place: &Rendezvous) -> String {
    let keys: Vec<String> = (0..place.world_size).map(here).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let came = which_came(notes, &keys, Instant::now() + Duration::from_secs(2));
    let absent = |(rank, came): (Rank, bool)| (!came).then_some(rank);
    let ranks: Vec<Rank> = (0..).zip(came).filter_map(absent).collect();
    format!(
        "not all {} ranks came in time: missing {}",
        place.world_size,
        list(&ranks)
    )
}

/// What rank 0 says for all ranks.
pub(crate) struct Agreed {
    pub(crate) secret: Secret,
    /// The name of this run.
    pub(crate) run: String,
    pub(crate) tuning: Tuning,
}

/// The secret, the name of this run and the table of algorithms: rank 0 says.
pub(crate) fn agree(
    notes: &dyn Store,
    place: &Rendezvous,
    config: &Config,
    deadline: Deadline,
) -> Result<Agreed> {
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
        let tuning = config.tuning.clone();
        // Nothing to read where it is the one that every rank knows.
        let mut told = format!("{run}\n");
        if tuning != Tuning::default() {
            told.push_str(&tuning.to_string());
        }
        notes.set("run", told.as_bytes())?;
        return Ok(Agreed {
            secret,
            run,
            tuning,
        });
    }
    let run = notes.get("run", deadline.remaining())?;
    let told = String::from_utf8_lossy(&run);
    let (run, table) = told.split_once('\n').unwrap_or((&told, ""));
    let run = run.to_owned();
    let tuning = match table {
        "" => Tuning::default(),
        table => Tuning::from_table(table)?,
    };
    if let Some(secret) = &config.secret {
        return Ok(Agreed {
            secret: secret.clone(),
            run,
            tuning,
        });
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
    Ok(Agreed {
        secret: Secret::from_bytes(bytes),
        run,
        tuning,
    })
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

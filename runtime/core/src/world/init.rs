//! The rendezvous of a job's ranks: each waits for the others and obtains the job's secret. A process already knows
//! its rank by then ([`Rendezvous`]).
//!
//! Also other steps by which a world is made: opening the ring, writing keys to the store, and naming the run.

use crate::config::rendezvous::{ALL_HERE, REFUSAL_READ, Rendezvous};
use crate::config::{Config, RingDir};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{BatchReply, BatchRequest, PrefixStore, Store, StoreQuery, absent_among};
use crate::tuning::Tuning;
use crate::watch::failure_broadcast::FLAG;
use crate::world::job_secret::JobSecret;
use crate::world::session::StoreHost;
use rcomm_recorder::model::{Rank, text};
use rcomm_recorder::publish::Secret;
use rcomm_recorder::record::{
    FlightRecorder, OnConflict, Placement, RecorderConfig, Storage, Touch,
};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Clears PyTorch's flag if an earlier attempt of the job left it in the store: an agent that outlives its ranks may
/// serve that store. Otherwise this attempt would make needless dumps, and a flag that it raises would be overlooked:
/// PyTorch's key carries no attempt number.
///
/// The last rank to check in calls this before it publishes that all have arrived, and every rank reads the flag only
/// after that. So no flag of this attempt's own ranks is cleared.
fn clear_earlier_flag(root: &dyn Store, notes: &dyn Store, place: &Rendezvous) -> Result<()> {
    if place.attempt > 0 && notes.add("flag seen to", 1)? == 1 && root.delete(FLAG)? {
        tracing::info!(
            attempt = place.attempt,
            "cleared the dump flag that an earlier attempt left in the store"
        );
    }
    Ok(())
}

/// Checks in ([`Rendezvous::check_in`]), waits until all ranks have arrived, verifies that all were given the
/// same secret, or none, and reads the settings that rank 0 writes for all.
///
/// Each rank writes a statement about its secret to the store, and rank 0 also its settings. The last to check in
/// compares the statements and publishes the result, so that all ranks fail if one statement differs. The request that
/// waits for the result also reads rank 0's settings. A rank writes all its keys in one request, before it knows
/// whether it may check in. A refused rank's keys do no harm: keys contain the job and the world size, and of two ranks
/// with one number the first to check in is accepted.
///
/// # Errors
/// `Rendezvous` if this rank may not check in, if not all ranks arrive before the deadline, or if their secrets
/// differ. Otherwise the store's error, or as [`JobSecret::agree`].
///
/// # Blocking
/// Until the deadline, and then for as long as the store takes to answer a few requests. A caller that must not be
/// delayed by a silent store calls this on a thread that it need not wait for.
pub(crate) fn rendezvous(
    root: &dyn Store,
    notes: &PrefixStore<dyn Store>,
    place: &Rendezvous,
    config: &Config,
    secret: JobSecret,
    deadline: Deadline,
) -> Result<RendezvousResult, Refused> {
    let own_settings = (place.rank == 0).then(|| Settings::of_rank_0(config));
    let text = own_settings.as_ref().map(Settings::to_text);
    let own_statement = secret.statement(place);
    let check_in = place.check_in_keys();
    let count = arrival_count_key(place);
    let (here, here_count, settings_key) = (
        notes.name(&statement_key(place, place.rank)),
        notes.name(&count),
        notes.name(&settings_key(place)),
    );
    let text = text.iter().map(|text| BatchRequest::CompareSet {
        key: &settings_key,
        expected: b"",
        desired: text.as_bytes(),
    });
    let arrival = [
        BatchRequest::CompareSet {
            key: &here,
            expected: b"",
            desired: own_statement.as_bytes(),
        },
        BatchRequest::Add {
            key: &here_count,
            delta: 1,
        },
    ];
    let check_in_requests = check_in.requests().into_iter();
    let requests: Vec<_> = check_in_requests.chain(text).chain(arrival).collect();
    let replies = root.batch(&requests)?;
    if let Err(error) = place.checked_in(root, &check_in, &replies) {
        return Err(Refused {
            error,
            readers: place.world_size.into(),
            keep: late_rank_time(config, deadline),
        });
    }
    let is_last = matches!(replies.last(), Some(&BatchReply::Count(count))
        if count >= i64::from(place.world_size));
    let result = match is_last {
        true => {
            let result = result_for_all(notes, place, deadline)?;
            clear_earlier_flag(root, notes, place)?;
            notes.compare_set(ALL_HERE, b"", result.as_bytes())
        }
        false => notes.get(ALL_HERE, deadline.remaining()),
    };
    let result = match result {
        // The first rank that reaches its deadline publishes the error, and all fail with the same text.
        Err(error) if error.kind() == ErrorKind::Timeout => {
            let absent = name_absent(notes, place)?;
            notes.compare_set(ALL_HERE, b"", absent.as_bytes())?
        }
        result => result?,
    };
    let result = String::from_utf8_lossy(&result);
    if let Some(text) = result.strip_prefix(YES) {
        let settings = match own_settings {
            Some(own_settings) => own_settings,
            None => Settings::from_text(text)?,
        };
        let statement_keys: Vec<String> = (0..place.world_size)
            .map(|rank| statement_key(place, rank))
            .collect();
        let sealed = |rank| format!("sealed/{}/{rank}", place.key_scope());
        let secret = secret.agree(notes, place, &statement_keys, sealed, deadline)?;
        return Ok(RendezvousResult { secret, settings });
    }
    let (message, ranks) = result.split_once('\n').unwrap_or((&result, ""));
    let ranks: Vec<Rank> = ranks
        .split(',')
        .filter_map(|rank| rank.parse().ok())
        .collect();
    // The rank that serves the store may have closed it by now, which does not hide the reason.
    if let Err(error) = notes.add(REFUSAL_READ, 1) {
        tracing::debug!(%error, "the store closed after the refusal was read");
    }
    let (readers, keep) = match ranks.is_empty() {
        true => (place.world_size.into(), late_rank_time(config, deadline)),
        // The time to start has passed: ranks that did not arrive are not waited for.
        false => (notes.add(&count, 0).unwrap_or(0), config.status_wait),
    };
    Err(Refused {
        error: Error::new(ErrorKind::Rendezvous, message).with_ranks(&ranks),
        readers,
        keep,
    })
}

/// Why there is no rendezvous, and for how many ranks the store is kept.
pub(crate) struct Refused {
    pub(crate) error: Error,
    /// How many ranks must have read the reason in the store before it may close; 0 if the reason is not there.
    readers: i64,
    /// The longest time for which the rank that serves the store keeps it for these readers.
    keep: Duration,
}

impl Refused {
    /// On the rank that serves the store: waits until the other ranks have read why, for a limited time. Returns at
    /// once on any other rank.
    pub(crate) fn keep_store(&self, notes: &dyn Store, place: &Rendezvous) {
        keep_store(notes, place, self.readers, self.keep);
    }

    /// Whether the store has not replied to a request. A wait for other ranks that has timed out does not count: its
    /// error names the absent ranks.
    pub(crate) fn is_without_answer(&self) -> bool {
        self.error.kind() == ErrorKind::Timeout && self.error.ranks().is_empty()
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self {
            error,
            readers: 0,
            keep: Duration::ZERO,
        }
    }
}

/// Names the server of the store in the error of a request that the store did not answer. Any other error stays as it
/// is.
///
/// The error of a rank whose own process serves the store stays, too.
pub(crate) fn name_store_host(
    error: Error,
    store: &dyn Store,
    host: StoreHost,
    own_rank: Rank,
) -> Error {
    if error.kind() != ErrorKind::Timeout || !error.ranks().is_empty() || store.server().is_none() {
        return error;
    }
    match host {
        StoreHost::Rank0 if own_rank == 0 => error,
        StoreHost::Rank0 => error.with_rank(0).with_more("rank 0 serves the store"),
        StoreHost::Other => error.with_more("the launcher or the program serves the store"),
    }
}

/// The error of a rendezvous in which the store has not replied by the deadline, nor within [`Config::status_wait`]
/// after it.
pub(crate) fn store_silent(store: &dyn Store, host: StoreHost, config: &Config) -> Error {
    let which_store = match (store.server(), host) {
        (None, _) => "the store".to_owned(),
        (Some(server), StoreHost::Other) => {
            format!("the store at {server}, which the launcher or the program serves,")
        }
        (Some(server), StoreHost::Rank0) => {
            format!("the store at {server}, which rank 0 serves,")
        }
    };
    let message = format!(
        "{which_store} did not answer within {} of the start and {} more: its process or the network to it may have \
         stopped, so it is not known which ranks have arrived",
        text::duration(config.init_timeout),
        text::duration(config.status_wait),
    );
    let error = Error::new(ErrorKind::Timeout, message);
    match (store.server(), host) {
        (Some(_), StoreHost::Rank0) => error.with_rank(0),
        _ => error,
    }
}

/// After a refusal that names no absent ranks, the rank that serves the store keeps it until all ranks have read why:
/// for this long and until the deadline at the latest, or for [`Config::status_wait`] if that is longer. So a rank that
/// starts a little later still finds the store.
const STORE_KEPT: Duration = Duration::from_secs(10);
/// How often the rank that serves the store counts the ranks that have read a refusal.
const COUNT_INTERVAL: Duration = Duration::from_millis(5);

/// How long ranks that start later are waited for.
fn late_rank_time(config: &Config, deadline: Deadline) -> Duration {
    STORE_KEPT.min(deadline.remaining()).max(config.status_wait)
}

/// On the rank that serves the store: waits until this many ranks have read that the job was refused, for at most
/// `limit`. Returns at once on any other rank.
fn keep_store(notes: &dyn Store, place: &Rendezvous, readers: i64, limit: Duration) {
    let until = Instant::now() + limit;
    while place.serves_store()
        && Instant::now() < until
        && notes.add(REFUSAL_READ, 0).is_ok_and(|read| read < readers)
    {
        std::thread::sleep(COUNT_INTERVAL);
    }
}

/// The beginning of a published result that lets the ranks continue, before rank 0's settings. Any other
/// result is an error message.
const YES: &str = "yes\n";
/// The most ranks that a message lists.
const MAX_RANKS: usize = 16;

/// The key of a rank's statement about its secret.
fn statement_key(place: &Rendezvous, rank: Rank) -> String {
    format!("here/{}/{rank}", place.key_scope())
}

/// The key of rank 0's settings, which the last rank to check in copies into the result.
fn settings_key(place: &Rendezvous) -> String {
    format!("run/{}", place.key_scope())
}

/// The key of the number of ranks that have arrived.
fn arrival_count_key(place: &Rendezvous) -> String {
    format!("count/{}", place.key_scope())
}

/// The result that is published once all ranks have arrived: [`YES`] and rank 0's settings, or an error
/// message.
fn result_for_all(notes: &dyn Store, place: &Rendezvous, deadline: Deadline) -> Result<String> {
    let keys = (0..place.world_size).map(|rank| statement_key(place, rank));
    let keys: Vec<String> = std::iter::once(settings_key(place)).chain(keys).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let values = notes.multi_get(&keys, deadline.remaining())?;
    let (settings, statements) = values
        .split_first()
        .map_or((&[][..], &[][..]), |(first, rest)| (first.as_slice(), rest));
    let settings = String::from_utf8_lossy(settings);
    Ok(compare_secrets(statements).unwrap_or_else(|| format!("{YES}{settings}")))
}

/// The part of a rank's statement about its secret that is compared with the others'. It leaves out the public key of a
/// rank without a secret, which is different on each rank.
fn comparable(statement: &[u8]) -> &[u8] {
    match statement.starts_with(b"none ") {
        true => b"none",
        false => statement,
    }
}

/// Whether this is the statement of a rank whose configuration has a secret.
fn was_given(statement: &[u8]) -> bool {
    !statement.starts_with(b"none") && !statement.starts_with(b"user ")
}

/// The error message if the secrets that the ranks were given differ; `None` if they agree.
fn compare_secrets(statements: &[Vec<u8>]) -> Option<String> {
    let first = statements.first()?;
    let other = |(rank, statement): (Rank, &Vec<u8>)| {
        (comparable(statement) != comparable(first)).then_some(rank)
    };
    let others: Vec<Rank> = (0..).zip(statements).filter_map(other).collect();
    if others.is_empty() {
        return None;
    }
    let others_given = others
        .iter()
        .any(|&rank| was_given(&statements[rank as usize]));
    let (given_to_rank_0, given_to_others) = match (was_given(first), others_given) {
        (false, true) => ("no job secret", "one"),
        (true, false) => ("a job secret", "none"),
        (true, true) => ("a job secret", "another"),
        (false, false) => {
            return Some(format!(
                "rank 0 was given no job secret, and shares no file with {}: they are on another host, in \
                 another container, or another user's. Set RCOMM_JOB_SECRET to the same value on all ranks",
                text::ranks(&others, MAX_RANKS)
            ));
        }
    };
    Some(format!(
        "rank 0 was given {given_to_rank_0}, but {} {given_to_others}: set RCOMM_JOB_SECRET to the same value on all \
         ranks, or on none",
        text::ranks(&others, MAX_RANKS)
    ))
}

/// The error message that names the ranks that did not arrive; its second line has only their numbers.
///
/// # Errors
/// That of the store, if it no longer answers: then it is not known who is absent.
fn name_absent(notes: &PrefixStore<dyn Store>, place: &Rendezvous) -> Result<String> {
    let keys = (0..place.world_size).map(|rank| statement_key(place, rank));
    let keys: Vec<String> = keys.collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let absent = absent_among(notes, &keys, Instant::now() + Duration::from_secs(2)).at_least()?;
    let ranks: Vec<Rank> = absent.into_iter().map(|rank| rank as Rank).collect();
    let refused = match notes.inner().get("rcomm/refused", Duration::from_millis(1)) {
        Ok(text) => refusals(&String::from_utf8_lossy(&text)),
        Err(_) => String::new(),
    };
    let numbers: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    Ok(format!(
        "not all {} ranks arrived in time: missing {}{refused}\n{}",
        place.world_size,
        text::ranks(&ranks, MAX_RANKS),
        numbers.join(",")
    ))
}

/// The part of an error message that states how many clients the store has refused, from the store's note on them.
fn refusals(noted: &str) -> String {
    let (times, last) = noted.split_once(' ').unwrap_or((noted, "an unknown host"));
    let times: String = times.chars().filter(char::is_ascii_digit).collect();
    let last: String = last.chars().filter(|c| !c.is_control()).take(64).collect();
    let (plural, from) = match times.as_str() {
        "1" => ("", "from"),
        _ => ("s", "the last from"),
    };
    format!(
        ". The store refused {times} connection{plural} that did not prove the job's secret, {from} {last}: is \
         RCOMM_JOB_SECRET the same on all ranks?"
    )
}

/// The result of the rendezvous, the same on all ranks.
pub(crate) struct RendezvousResult {
    pub(crate) secret: Secret,
    pub(crate) settings: Settings,
}

/// The settings that rank 0 decides for all ranks.
pub(crate) struct Settings {
    /// The name of this run.
    pub(crate) run: String,
    /// The table of algorithms.
    pub(crate) tuning: Tuning,
}

impl Settings {
    fn of_rank_0(config: &Config) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            run: now.map_or(0, |now| now.as_millis()).to_string(),
            tuning: config.tuning.clone(),
        }
    }

    /// The settings as text: a line with the name of the run, then the table of algorithms unless it is the
    /// built-in one.
    fn to_text(&self) -> String {
        let table = match self.tuning == Tuning::default() {
            true => String::new(),
            false => self.tuning.to_string(),
        };
        format!("{}\n{table}", self.run)
    }

    fn from_text(text: &str) -> Result<Self> {
        let (run, table) = text.split_once('\n').unwrap_or((text, ""));
        let tuning = match table {
            "" => Tuning::default(),
            table => Tuning::from_table(table)?,
        };
        Ok(Self {
            run: run.to_owned(),
            tuning,
        })
    }
}

/// Opens this rank's ring. If the configured place cannot be used, other places and finally this process's memory are
/// tried: a job must not fail because it cannot be recorded. Returns `None` if another living process records as this
/// rank, unless `on_conflict` allows another place for the ring.
///
/// # Errors
/// `Io` if the recorder refuses the configuration; `InvalidArgument` if the size in MiB has no room for a ring.
pub(crate) fn open_recorder(
    place: &Rendezvous,
    config: &Config,
    on_conflict: OnConflict,
) -> Result<Option<FlightRecorder>> {
    let mut recorder = RecorderConfig {
        placement: match &config.ring_dir {
            RingDir::Shared => Placement::Shared,
            RingDir::Dir(dir) => Placement::Dir(dir.clone()),
            RingDir::Memory => Placement::Memory,
        },
        // The watchdog touches the ring's pages once the world is made.
        touch: Touch::Ahead,
        attempt: place.attempt,
        entries: config.ring_entries,
        ..RecorderConfig::new(place.job.clone(), place.rank, place.world_size)
    };
    if let Some(mib) = config.ring_mib {
        recorder.entries = entries_within(&recorder, mib)?;
    }
    match FlightRecorder::create_anywhere(&recorder, on_conflict) {
        Ok((recorder, None)) => Ok(Some(recorder)),
        Ok((recorder, Some(why))) => {
            report_place(place.rank, &recorder, &why);
            Ok(Some(recorder))
        }
        Err(rcomm_recorder::Error::RankTaken { .. }) => Ok(None),
        Err(error) => {
            let message = "cannot open the ring of the flight recorder";
            Err(Error::new(ErrorKind::Io, message).with_source(error))
        }
    }
}

/// The number of operations that a ring of `mib` MiB holds.
///
/// # Errors
/// `InvalidArgument` if it has no room for one.
fn entries_within(recorder: &RecorderConfig, mib: u32) -> Result<u32> {
    let bytes = (mib as usize).saturating_mul(1 << 20);
    recorder.entries_within(bytes).ok_or_else(|| {
        let least = recorder.bytes_with(1).div_ceil(1 << 20);
        let message = format!(
            "a ring of {mib} MiB has no room for the tables of a job of {} ranks: it takes {least} MiB or more",
            recorder.world_size
        );
        Error::new(ErrorKind::InvalidArgument, message)
    })
}

/// Reports on standard error that the ring is not where, or as large as, it was configured to be: users of a
/// program without a log must see that too.
#[expect(
    clippy::print_stderr,
    reason = "users must learn where the record is, even without a log"
)]
fn report_place(rank: Rank, recorder: &FlightRecorder, reason: &str) {
    let place = match recorder.storage() {
        Storage::File(path) => path.display().to_string(),
        Storage::Memory { .. } => "its own memory, which ends with the process".to_owned(),
    };
    let entries = recorder.entries();
    eprintln!(
        "rcomm: rank {rank} records its last {entries} operations in {place}, because it {reason}"
    );
}

/// Writes keys and values to the store in one request; makes no request if there are none. Waits for the store for
/// `limit` at most.
pub(crate) fn write_notes(
    store: &Arc<dyn Store>,
    notes: Vec<(String, Vec<u8>)>,
    limit: Duration,
) -> Result<()> {
    if notes.is_empty() {
        return Ok(());
    }
    StoreQuery::within(store, limit, move |store| {
        let notes: Vec<(&str, &[u8])> = notes
            .iter()
            .map(|(key, note)| (key.as_str(), note.as_slice()))
            .collect();
        store.multi_set(&notes)
    })
}

/// Where the ring is, for the log.
pub(crate) fn ring_place(recorder: &FlightRecorder) -> String {
    match recorder.storage() {
        Storage::File(path) => path.display().to_string(),
        Storage::Memory { why: None } => "in memory".to_owned(),
        Storage::Memory { why: Some(why) } => format!("in memory only, because it {why}"),
    }
}

/// The name of this run's directory: the job's name, `-`, and the name of the run. Of the job's name it has the first
/// 64 characters, except leading dots; `_` replaces all but ASCII letters, digits, `.`, `-` and `_`.
pub(crate) fn run_name(job: &str, run: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let job: String = job
        .chars()
        .map(|c| if plain(c) { c } else { '_' })
        .take(64)
        .collect();
    format!("{}-{run}", job.trim_start_matches('.'))
}

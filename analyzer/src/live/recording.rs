//! Writes the snapshots of a live view to a file, and reads them for a replay.
//!
//! A recording is a gzip stream. Its first line is a header. Each frame then is one line of JSON with the lengths of
//! its records, followed by these records as dumps in JSON. A frame holds the records that changed since the previous
//! frame, and why ranks did not answer. A recording that was cut is read up to its last whole frame.

use crate::live::source::{Liveness, Observation, Poll, Seen};
use crate::live::{Moment, Snapshot};
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Name and version of the format.
const SCHEMA: &str = "rcomm.recording/1";
/// A frame holds at most this many operations of one record, unless older ones are pending.
const RECENT_OPERATIONS: usize = 512;
/// The longest line and the longest record that are read, bytes.
const MOST_BYTES: u64 = 256 << 20;

#[derive(Serialize, Deserialize)]
struct Header {
    schema: String,
}

/// The line with which a frame begins.
#[derive(Serialize, Deserialize)]
struct FrameHead {
    /// [`Moment::wall_ns`] of the snapshot.
    at_ns: i64,
    /// [`Moment::elapsed`] of the snapshot, ns.
    elapsed_ns: u64,
    /// The number of ranks of the job; 0 if the records do not state it.
    world_size: usize,
    records: Vec<RecordedHead>,
    silent: Vec<UnreadRank>,
}

/// What a frame states about one record: whose it is, whether the process was alive (`None` if unknown), and the length
/// of the dump.
#[derive(Serialize, Deserialize)]
struct RecordedHead {
    rank: Rank,
    part: u8,
    alive: Option<bool>,
    bytes: u64,
}

/// A rank that could not be read, and the reason.
#[derive(Serialize, Deserialize)]
struct UnreadRank {
    rank: Rank,
    why: String,
}

/// Writes a recording, frame by frame.
pub struct RecordingWriter {
    out: GzEncoder<File>,
    last: HashMap<(Rank, u8), Arc<Dump>>,
}

impl RecordingWriter {
    /// Begins a recording in a new file that only its owner can read.
    ///
    /// # Errors
    ///
    /// If the file exists, or cannot be created or written.
    pub fn create(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let mut options = File::options();
        let file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        let mut writer = Self {
            out: GzEncoder::new(file, Compression::fast()),
            last: HashMap::new(),
        };
        writer.write_line(&Header {
            schema: SCHEMA.into(),
        })?;
        Ok(writer)
    }

    /// Adds a frame with the records of `snapshot` that changed since the previous frame, and the reasons why ranks
    /// could not be read.
    ///
    /// # Blocking
    ///
    /// Until the file is written.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn write(&mut self, snapshot: &Snapshot) -> io::Result<()> {
        let mut records = Vec::new();
        let mut blobs: Vec<Vec<u8>> = Vec::new();
        let mut silent = Vec::new();
        for view in snapshot.ranks.iter() {
            if let Some(why) = &view.failure {
                silent.push(UnreadRank {
                    rank: view.rank,
                    why: why.to_string(),
                });
                continue;
            }
            for (part, dump) in (0u8..).zip(&view.dumps) {
                let key = (view.rank, part);
                if self
                    .last
                    .get(&key)
                    .is_some_and(|last| Arc::ptr_eq(last, dump))
                {
                    continue;
                }
                let blob = dump.newest(RECENT_OPERATIONS).to_json();
                self.last.insert(key, dump.clone());
                records.push(RecordedHead {
                    rank: view.rank,
                    part,
                    alive: match view.liveness {
                        Liveness::Unknown => None,
                        Liveness::Alive => Some(true),
                        Liveness::Dead => Some(false),
                    },
                    bytes: blob.len() as u64,
                });
                blobs.push(blob);
            }
        }
        let elapsed = snapshot.at.elapsed.as_nanos();
        self.write_line(&FrameHead {
            at_ns: snapshot.at.wall_ns,
            elapsed_ns: u64::try_from(elapsed).unwrap_or(u64::MAX),
            world_size: match snapshot.report.input.may_have_more {
                true => 0,
                false => snapshot.ranks.len(),
            },
            records,
            silent,
        })?;
        for blob in &blobs {
            self.out.write_all(blob)?;
        }
        // If the process is killed after this, the recording is complete up to here.
        self.out.flush()
    }

    fn write_line(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, value)?;
        self.out.write_all(b"\n")
    }
}

/// Reads a recording, frame by frame.
pub struct RecordingReader {
    input: BufReader<MultiGzDecoder<File>>,
    known: BTreeSet<(Rank, u8)>,
}

impl RecordingReader {
    /// Opens a recording; `None` if the path is no file, or the file cannot be read as a recording. Blocks until its
    /// header is read.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        if !path.is_file() {
            return Ok(None);
        }
        let mut reader = Self {
            input: BufReader::new(MultiGzDecoder::new(File::open(path)?)),
            known: BTreeSet::new(),
        };
        // A file that is not a gzip stream, or has another header, is not a recording.
        let header = match reader.read_line() {
            Ok(Some(line)) => serde_json::from_slice::<Header>(&line).ok(),
            Ok(None) | Err(_) => None,
        };
        Ok(header
            .is_some_and(|header| header.schema == SCHEMA)
            .then_some(reader))
    }

    /// The next frame: its time, and an observation of every record so far; `None` at the end. Blocks until the frame
    /// is read.
    ///
    /// # Errors
    ///
    /// If the file is damaged. A file that merely ends too early is not an error: its frames end there.
    pub fn next_frame(&mut self) -> io::Result<Option<(Moment, Poll)>> {
        let Some(line) = self.read_line()? else {
            return Ok(None);
        };
        let head: FrameHead = serde_json::from_slice(&line)?;
        let mut changed = HashMap::new();
        for record in &head.records {
            let Some(bytes) = self.read_bytes(record.bytes)? else {
                return Ok(None);
            };
            let (dump, _) = Dump::read(&bytes).map_err(io::Error::other)?;
            self.known.insert((record.rank, record.part));
            let liveness = match record.alive {
                None => Liveness::Unknown,
                Some(true) => Liveness::Alive,
                Some(false) => Liveness::Dead,
            };
            changed.insert((record.rank, record.part), (liveness, dump));
        }
        let observations = self.known.iter().map(|&(rank, part)| {
            let silent = head.silent.iter().find(|silent| silent.rank == rank);
            let (liveness, seen) = match (changed.remove(&(rank, part)), silent) {
                (_, Some(silent)) => (Liveness::Unknown, Seen::Failed(silent.why.clone())),
                (Some((liveness, dump)), None) => (liveness, Seen::Changed(Box::new(dump))),
                (None, None) => (
                    Liveness::Unknown,
                    Seen::Unchanged {
                        heartbeat_ns: 0,
                        as_of_ns: 0,
                    },
                ),
            };
            Observation {
                rank,
                part,
                liveness,
                seen,
            }
        });
        let moment = Moment {
            elapsed: Duration::from_nanos(head.elapsed_ns),
            wall_ns: head.at_ns,
        };
        let poll = Poll {
            observations: observations.collect(),
            world_size: u32::try_from(head.world_size).ok().filter(|&size| size > 0),
            ..Poll::default()
        };
        Ok(Some((moment, poll)))
    }

    /// A line without its line break; `None` if the stream ends before one, or the line is longer than [`MOST_BYTES`].
    fn read_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        let read = (&mut self.input)
            .take(MOST_BYTES)
            .read_until(b'\n', &mut line);
        match read {
            Ok(_) if line.pop() == Some(b'\n') => Ok(Some(line)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The next `length` bytes; `None` if the stream ends before. An error if they are more than [`MOST_BYTES`].
    fn read_bytes(&mut self, length: u64) -> io::Result<Option<Vec<u8>>> {
        if length > MOST_BYTES {
            let text = format!("a record of {length} bytes is too long");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut bytes = Vec::new();
        match (&mut self.input).take(length).read_to_end(&mut bytes) {
            Ok(read) if read as u64 == length => Ok(Some(bytes)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::simulate::{Simulation, Situation};
    use crate::live::source::{SimulatedSource, Source};
    use crate::live::{Live, LiveOptions};
    use std::time::Instant;

    fn moment(ns: i64) -> Moment {
        Moment {
            elapsed: Duration::from_nanos(ns as u64),
            wall_ns: ns,
        }
    }

    fn live() -> Live {
        Live::new(
            LiveOptions::default(),
            rcomm_verdict::analyze,
            vec!["test".into()],
        )
    }

    /// Records a job before and after it gets stuck.
    fn record(path: &Path) -> Vec<Snapshot> {
        let simulation = Simulation::new(Situation::StuckRank, 16, 0);
        let fault = simulation.fault_ns();
        let mut live = live();
        let mut writer = RecordingWriter::create(path).expect("a recording can be made");
        let mut snapshots = Vec::new();
        for ns in [
            fault - 100_000_000,
            fault + 2_000_000_000,
            fault + 20_000_000_000,
        ] {
            let mut source = SimulatedSource::new(simulation.clone(), move || ns);
            live.observe(0, source.poll(Instant::now()), moment(ns));
            let snapshot = live
                .refresh(moment(ns))
                .expect("changed observations give a snapshot");
            writer
                .write(&snapshot)
                .expect("the recording can be written");
            snapshots.push(snapshot);
        }
        snapshots
    }

    #[test]
    fn a_recording_read_back_is_judged_as_it_was() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let path = directory.path().join("job.rec");
        let snapshots = record(&path);
        let mut reader = RecordingReader::open(&path)
            .expect("the file can be read")
            .expect("the file is a recording");
        let mut live = live();
        for recorded in snapshots {
            let (at, poll) = reader
                .next_frame()
                .expect("the recording can be read")
                .expect("there is a frame for each snapshot");
            live.observe(0, Ok(poll), at);
            let replayed = live
                .refresh(at)
                .expect("changed observations give a snapshot");
            assert_eq!(replayed.report.verdict, recorded.report.verdict);
            let sentences = |snapshot: &Snapshot| -> Vec<String> {
                let findings = snapshot.report.findings.iter();
                findings.map(|finding| finding.sentence.clone()).collect()
            };
            assert_eq!(sentences(&replayed), sentences(&recorded));
            assert_eq!(replayed.ranks.len(), recorded.ranks.len());
        }
        assert!(
            reader
                .next_frame()
                .expect("the recording can be read")
                .is_none()
        );
    }

    #[test]
    fn a_recording_that_was_cut_is_read_up_to_its_last_whole_frame() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let path = directory.path().join("job.rec");
        record(&path);
        let whole = std::fs::read(&path).expect("the file can be read");
        let cut = directory.path().join("cut.rec");
        std::fs::write(&cut, &whole[..whole.len() * 2 / 3]).expect("the file can be written");
        let mut reader = RecordingReader::open(&cut)
            .expect("the file can be read")
            .expect("the file is a recording");
        let mut frames = 0;
        while reader
            .next_frame()
            .expect("a recording that is cut short is no error")
            .is_some()
        {
            frames += 1;
        }
        assert!((1..3).contains(&frames), "{frames}");
    }

    #[test]
    fn another_file_is_no_recording_and_an_existing_one_is_not_written_over() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let path = directory.path().join("other");
        std::fs::write(&path, b"{\"entries\": []}").expect("the file can be written");
        assert!(
            RecordingReader::open(&path)
                .expect("the file can be read")
                .is_none()
        );
        assert!(
            RecordingReader::open(directory.path())
                .expect("a directory is no recording and no error")
                .is_none()
        );
        let error = RecordingWriter::create(&path)
            .err()
            .expect("a file that exists is an error");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }
}

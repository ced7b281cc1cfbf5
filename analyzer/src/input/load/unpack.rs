//! Reads one file: a dump, a log, a report of NCCL's RAS, call stacks, a ring or a summary, plain, compressed or in an
//! archive.

use super::find::InputFile;
use super::manifest::{Absence, Manifest};
use super::sums::{LARGE_FILE, Sums};
use super::zstd::Frames;
use super::{KEPT_BYTES, Output, Worker, rank_name};
use crate::input::log;
use crate::input::rsum::{self, Piece};
use flate2::read::MultiGzDecoder;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::RingReader;
use rcomm_verdict::{Problem, format};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;

/// The largest number of layers of compression and archives that are unpacked; a `.tar.gz` has two.
const MAX_DEPTH: usize = 4;

/// The kind of file, from its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gzip,
    Zstd,
    Tar,
    Ring,
    Summary,
    /// None of the above: a dump, a log, a report of NCCL's RAS, call stacks, or a file of another program.
    Plain,
}

/// The first bytes of archives and compressed files that are not supported, and the names of their formats.
const FOREIGN: [(&[u8], &str); 4] = [
    (b"PK\x03\x04", "zip"),
    (b"\xfd7zXZ\0", "xz"),
    (b"BZh", "bzip2"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
];

/// The number of bytes needed to distinguish the kinds: one block of a tar file.
const HEAD: usize = 512;

impl Kind {
    fn of(head: &[u8]) -> Self {
        if head.starts_with(b"\x1f\x8b") {
            Self::Gzip
        } else if head.starts_with(b"\x28\xb5\x2f\xfd") {
            Self::Zstd
        } else if head.get(257..262) == Some(b"ustar") {
            Self::Tar
        } else if RingReader::begins(head) {
            Self::Ring
        } else if rsum::begins(head) {
            Self::Summary
        } else {
            Self::Plain
        }
    }
}

/// Reads one input of any kind; an error becomes a problem.
pub(super) fn unpack(input: &InputFile, rank: Option<Rank>, worker: &mut Worker<'_>) {
    let name = input.name();
    let result = match input {
        InputFile::File(path) => file(path, &name, rank, worker),
        InputFile::Stdin => stdin(&name, worker),
    };
    if let Err(error) = result {
        worker.unreadable(&name, error);
    }
}

fn file(path: &Path, name: &str, rank: Option<Rank>, worker: &mut Worker<'_>) -> io::Result<()> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut file = File::open(path)?;
    let head = head(&mut file)?;
    match Kind::of(&head) {
        Kind::Plain => {
            let max_bytes = worker.options.max_file_bytes;
            let is_stream = metadata.len() > HELD_TEXT && log::may_begin(&head);
            if metadata.len() > max_bytes && !is_stream {
                return Err(too_large(max_bytes));
            }
            let reserved = if is_stream {
                0
            } else {
                metadata.len().min(LARGE_FILE)
            };
            worker.buffer.reserve(reserved as usize + 1);
            plain(&head, &mut file, name, rank, worker)
        }
        Kind::Ring => {
            worker.send(Output::Files(1));
            match RingReader::attach(path).and_then(|ring| ring.read()) {
                Ok(dump) => worker.send_dump(name, dump, false, rank),
                Err(error) => worker.unusable(name, error),
            }
            Ok(())
        }
        _ => {
            // Such a file is read twice: the names of all members of an archive are needed to find their ranks.
            file.rewind()?;
            worker.sums.open(metadata.len());
            let budget = budget(metadata.len(), worker);
            let ranks = MemberRanks::of(&mut file, name, rank, budget);
            file.rewind()?;
            stream(&mut file, name, 0, worker, &ranks)
        }
    }
}

/// Standard input can be read only once, so it is held in memory.
fn stdin(name: &str, worker: &mut Worker<'_>) -> io::Result<()> {
    let mut bytes = Vec::new();
    let max_bytes = worker.options.max_file_bytes;
    io::stdin()
        .lock()
        .take(max_bytes + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(too_large(max_bytes));
    }
    worker.sums.open(bytes.len() as u64);
    let budget = budget(bytes.len() as u64, worker);
    let ranks = MemberRanks::of(&mut &bytes[..], name, None, budget);
    stream(&mut &bytes[..], name, 0, worker, &ranks)
}

/// The largest ratio of unpacked to packed size. Records shrink to a few percent. Files compressed several times can
/// shrink far more; unpacking one could take hours and yield nothing useful.
const MAX_RATIO: u64 = 1000;

/// The number of bytes that each compressed stream in an input of `packed` bytes may unpack to. It is at least one more
/// than the size of the largest file that is read: even a tiny input may hold a file of that size, and one that is
/// larger is refused as too large.
fn budget(packed: u64, worker: &Worker<'_>) -> u64 {
    let max_bytes = packed.saturating_mul(MAX_RATIO);
    max_bytes.max(worker.options.max_file_bytes.saturating_add(1))
}

/// A reader of unpacked bytes that fails if they exceed its budget.
struct Unpacked<'a, R> {
    /// The reader that decompresses.
    decoder: R,
    /// The bytes that may still be read.
    remaining: u64,
    /// The sums of all inputs; `None` where the bytes are only looked through for names.
    sums: Option<&'a Sums>,
}

impl<R: Read> Read for Unpacked<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.decoder.read(buffer)?;
        self.remaining = self.remaining.checked_sub(read as u64).ok_or_else(|| {
            io::Error::other(format!(
                "it unpacks to over {MAX_RATIO} times the size of the whole input"
            ))
        })?;
        if let Some(sums) = self.sums {
            sums.unpack(read as u64)?;
        }
        Ok(read)
    }
}

/// The ranks stated by the names of a packed input and of its members, and the budget of that input.
struct MemberRanks {
    /// The rank in each name of a member, which is written as `archive:member`.
    of_name: HashMap<String, Option<Rank>>,
    /// The rank in the name of the input itself, for members whose names state none.
    of_archive: Option<Rank>,
    /// The number of bytes that each compressed stream in the input may unpack to.
    budget: u64,
}

impl MemberRanks {
    /// Lists the archive. Members that cannot be listed cannot be read either: [`stream`] reports them.
    fn of(reader: &mut dyn Read, name: &str, of_archive: Option<Rank>, budget: u64) -> Self {
        let mut names = Vec::new();
        let _ = list(reader, name, 0, budget, &mut names);
        let ranks = rank_name::ranks(&names);
        Self {
            of_name: names.into_iter().zip(ranks).collect(),
            of_archive,
            budget,
        }
    }

    fn get(&self, name: &str) -> Option<Rank> {
        self.of_name
            .get(name)
            .copied()
            .flatten()
            .or(self.of_archive)
    }
}

/// The first [`HEAD`] bytes of a stream, or all bytes of a shorter one.
fn head(reader: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(HEAD);
    reader.take(HEAD as u64).read_to_end(&mut head)?;
    Ok(head)
}

/// Adds the names of all files that [`stream`] will read.
fn list(
    reader: &mut dyn Read,
    name: &str,
    depth: usize,
    budget: u64,
    names: &mut Vec<String>,
) -> io::Result<()> {
    let head = head(reader)?;
    let full_stream = io::Cursor::new(&head).chain(reader);
    match Kind::of(&head) {
        Kind::Gzip if depth < MAX_DEPTH => {
            let (decoder, remaining) = (MultiGzDecoder::new(full_stream), budget);
            list(
                &mut Unpacked {
                    decoder,
                    remaining,
                    sums: None,
                },
                name,
                depth + 1,
                budget,
                names,
            )
        }
        Kind::Zstd if depth < MAX_DEPTH => {
            let (decoder, remaining) = (Frames::new(full_stream), budget);
            list(
                &mut Unpacked {
                    decoder,
                    remaining,
                    sums: None,
                },
                name,
                depth + 1,
                budget,
                names,
            )
        }
        Kind::Tar if depth < MAX_DEPTH => {
            for member in tar::Archive::new(full_stream).entries()? {
                let Ok(mut member) = member else { break };
                if let Some(inner) = member_name(name, &member) {
                    let _ = list(&mut member, &inner, depth + 1, budget, names);
                }
            }
            Ok(())
        }
        _ => {
            names.push(name.to_owned());
            Ok(())
        }
    }
}

/// Reads every file in a stream.
fn stream(
    reader: &mut dyn Read,
    name: &str,
    depth: usize,
    worker: &mut Worker<'_>,
    ranks: &MemberRanks,
) -> io::Result<()> {
    let head = head(reader)?;
    let mut full_stream = io::Cursor::new(&head).chain(&mut *reader);
    match Kind::of(&head) {
        Kind::Gzip if depth < MAX_DEPTH => {
            let (decoder, remaining) = (MultiGzDecoder::new(full_stream), ranks.budget);
            let sums = Some(worker.sums);
            stream(
                &mut Unpacked {
                    decoder,
                    remaining,
                    sums,
                },
                name,
                depth + 1,
                worker,
                ranks,
            )
        }
        Kind::Zstd if depth < MAX_DEPTH => {
            let (decoder, remaining) = (Frames::new(full_stream), ranks.budget);
            let sums = Some(worker.sums);
            stream(
                &mut Unpacked {
                    decoder,
                    remaining,
                    sums,
                },
                name,
                depth + 1,
                worker,
                ranks,
            )
        }
        Kind::Tar if depth < MAX_DEPTH => {
            for member in tar::Archive::new(full_stream).entries()? {
                let mut member = member?;
                if let Some(inner) = member_name(name, &member) {
                    // A member that cannot be unpacked does not affect the others.
                    if let Err(error) = stream(&mut member, &inner, depth + 1, worker, ranks) {
                        worker.unreadable(&inner, error);
                    }
                }
            }
            Ok(())
        }
        Kind::Ring => ring(&mut full_stream, name, ranks.get(name), worker),
        Kind::Summary => {
            summary(&mut full_stream, name, worker);
            Ok(())
        }
        _ => plain(&head, reader, name, ranks.get(name), worker),
    }
}

/// The name `archive:member`; `None` for hidden members and those that are not regular files.
fn member_name<R: Read>(archive: &str, member: &tar::Entry<'_, R>) -> Option<String> {
    let path = member.path().ok()?;
    let is_hidden = path
        .file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    let is_file = member.header().entry_type().is_file();
    (is_file && !is_hidden).then(|| format!("{archive}:{}", path.display()))
}

/// Reads a plain file: `head` and the rest of `reader`.
fn plain(
    head: &[u8],
    reader: &mut dyn Read,
    name: &str,
    rank: Option<Rank>,
    worker: &mut Worker<'_>,
) -> io::Result<()> {
    worker.send(Output::Files(1));
    if let Some((_, format)) = FOREIGN.iter().find(|(begins, _)| head.starts_with(begins)) {
        let reason = format!(
            "{format} files are not read; unpack this one (.tar, .gz and .zst are read as they are)"
        );
        worker.foreign(name, reason);
        return Ok(());
    }
    let max_bytes = worker.options.max_file_bytes;
    worker.buffer.clear();
    worker.buffer.extend_from_slice(head);
    if log::may_begin(head) {
        // A text of more than `HELD_TEXT` bytes is taken for a log and read as a stream of any length.
        let more = (HELD_TEXT + 1).saturating_sub(head.len() as u64);
        let read = (&mut *reader).take(more).read_to_end(&mut worker.buffer);
        if read.is_ok() && worker.buffer.len() as u64 > HELD_TEXT {
            return long_log(reader, name, rank, worker);
        }
    }
    let sums = worker.sums;
    let mut admitted = None;
    let mut read = Ok(());
    // The first round reads the part that any number of threads may hold, the second one the rest.
    for limit in [LARGE_FILE.min(max_bytes), max_bytes] {
        if worker.buffer.len() as u64 >= LARGE_FILE {
            admitted = Some(sums.admit_large());
        }
        let more = (limit + 1).saturating_sub(worker.buffer.len() as u64);
        read = read.and_then(|()| {
            let mut part = (&mut *reader).take(more);
            part.read_to_end(&mut worker.buffer).map(drop)
        });
    }
    if worker.buffer.len() as u64 > max_bytes {
        worker.buffer.clear();
        worker.buffer.shrink_to(KEPT_BYTES);
        return Err(too_large(max_bytes));
    }
    // If the file cannot be read to its end, for example because compressed data was cut off, the part before is used.
    if let Err(error) = read {
        worker.unreadable(name, format!("{error}; what came before is used"));
    }
    if name.ends_with(":manifest.json")
        && let Some(manifest) = Manifest::parse(&worker.buffer)
    {
        for absence in Absence::sentences(&manifest.absent) {
            let sentence = format!("not in the archive: {absence}");
            worker.problem(Problem::unreadable_dump(name, sentence));
        }
        worker.send(Output::Manifest(manifest.world_size));
        return Ok(());
    }
    worker.read_buffer(name, rank);
    drop(admitted);
    Ok(())
}

/// The size in bytes of the largest text that is held in memory. Such a text may be a report of NCCL's RAS or call
/// stacks, which are recognized and read as a whole. Longer texts are taken for logs and read line by line.
const HELD_TEXT: u64 = 8 << 20;

/// Reads a log whose beginning is in the worker's buffer and whose rest is in `reader`.
fn long_log(
    reader: &mut dyn Read,
    name: &str,
    rank: Option<Rank>,
    worker: &mut Worker<'_>,
) -> io::Result<()> {
    let beginning = std::mem::take(&mut worker.buffer);
    let log = log::read(name, super::log_rank(name, rank), beginning.chain(reader))?;
    if log.facts().next().is_none() {
        worker.foreign(
            name,
            "a text in which no line is recognized as one that PyTorch, NCCL, gloo, rcomm or a launcher prints when a \
             job fails",
        );
    } else {
        worker.send(Output::Log(log));
    }
    Ok(())
}

/// Reads a summary: its records and problems, as if their files were here.
fn summary(reader: &mut dyn Read, name: &str, worker: &mut Worker<'_>) {
    let inner = |path: &str| format!("{name}:{path}");
    let mut count = |bytes| worker.sums.unpack(bytes);
    let result = rsum::read_within(reader, &mut count, |piece| match piece {
        Piece::Record {
            dump,
            path,
            cut,
            written_ns,
        } => worker.send_dump_written(&inner(&path), *dump, cut, (None, written_ns)),
        Piece::Problem(problem) => worker.problem(Problem {
            path: inner(&problem.path),
            more_paths: problem.more_paths.iter().map(|path| inner(path)).collect(),
            ..problem
        }),
        Piece::Ras(path, report) => worker.send(Output::Ras(inner(&path), report)),
        Piece::Files(files) => {
            worker.send(Output::Files(usize::try_from(files).unwrap_or(usize::MAX)));
        }
    });
    if let Err(error) = result {
        worker.unreadable(name, format!("{error}; what came before is used"));
    }
}

/// Reads a ring in an archive, in a compressed file or from standard input. A ring can only be read from a file, so it
/// is copied to a temporary one, which has no name and so does not outlive this process.
fn ring(
    reader: &mut dyn Read,
    name: &str,
    rank: Option<Rank>,
    worker: &mut Worker<'_>,
) -> io::Result<()> {
    worker.send(Output::Files(1));
    let max_bytes = worker.options.max_file_bytes;
    let mut spill = tempfile::tempfile()?;
    let written = io::copy(&mut reader.take(max_bytes + 1), &mut spill)?;
    if written > max_bytes {
        return Err(too_large(max_bytes));
    }
    spill.flush()?;
    match RingReader::of_file(spill, name.into()) {
        Ok(ring) => {
            let mut dump = ring.snapshot();
            // No process locks a copy, so the state of the ring's process is unknown.
            dump.identity.reason = "copy of a ring".to_owned();
            worker.send_dump(name, dump, false, rank);
        }
        Err(error) => worker.unusable(name, error),
    }
    Ok(())
}

fn too_large(max_bytes: u64) -> io::Error {
    io::Error::other(format!("it is larger than {}", format::bytes(max_bytes)))
}

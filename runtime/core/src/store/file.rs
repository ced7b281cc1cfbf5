//! A store in a file that processes share.
//!
//! The file is a log of records. A record is a key and a value, each after its length as a little-endian `u32`; the
//! last record of a key holds its value. A key of the user is written as `/key`, its removal as a record named `-/key`.
//! Writers append under an exclusive `flock`, readers read under a shared one. This is the layout of PyTorch's
//! `FileStore` (2.x), so ranks of rcomm and of PyTorch may share a file.

use super::table::{Compared, Table, sum};
use super::{Store, barrier_timed_out, timed_out};
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A lock is held for microseconds: if it is not free after this long, a process that holds it has probably
/// stopped.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
/// The pause between two polls of the file: the first, and the longest.
const POLL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));
/// How much of the file is read at a time, unless a record is longer.
const PIECE: u64 = 1 << 20;
/// PyTorch's counter of the stores that are open on the file.
const REFERENCES: &str = "refcount/";
/// PyTorch's counter of the stores on the file that were closed.
const FINISHED: &str = "cleanup/";

/// A [`Store`] in a file, for processes on one host or on a file system whose `flock` is shared.
///
/// Each job needs a new file: records that an earlier job left in it would be read as this job's. If the stores are
/// opened with a world size, the last of that many stores removes the file when it is dropped; the file of a job
/// that was killed stays.
///
/// A record that a killed writer left half written is dropped by the next writer.
pub struct FileStore {
    path: PathBuf,
    world_size: Option<u32>,
    log: Mutex<Log>,
}

/// The open file, and what was read from it.
struct Log {
    file: File,
    /// The offset up to which `table` includes the file; always the end of a record.
    read: u64,
    table: Table,
}

#[derive(Clone, Copy)]
enum LockKind {
    Read,
    Write,
}

impl FileStore {
    /// Opens the store in `path`, which is created (mode 0600) if it is not there.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the file cannot be opened or locked, [`ErrorKind::Timeout`] if it stays locked for a
    /// minute, [`ErrorKind::Store`] if it holds anything other than a store.
    pub fn open(path: impl AsRef<Path>, world_size: Option<u32>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&path)
            .map_err(|error| {
                Error::io(
                    format!("cannot open the store file {}", path.display()),
                    error,
                )
            })?;
        let store = Self {
            path,
            world_size,
            log: Mutex::new(Log {
                file,
                read: 0,
                table: Table::default(),
            }),
        };
        store.add_to_record(REFERENCES, 1)?;
        Ok(store)
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        // `read` moves only after its record is in the table, so a poisoned lock is usable.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` under the file's lock, on a table that holds all that was written before. Waits for the lock for a
    /// minute at most.
    fn with_log<T>(
        &self,
        kind: LockKind,
        work: impl FnOnce(&mut Log) -> io::Result<T>,
    ) -> Result<T> {
        match self.try_with_log(kind, LOCK_TIMEOUT, work)? {
            Some(result) => Ok(result),
            None => Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "the store file {} has been locked for {}: a process that holds the lock has \
                     probably stopped",
                    self.path.display(),
                    text::duration(LOCK_TIMEOUT)
                ),
            )),
        }
    }

    /// Like [`with_log`](Self::with_log), but waits for the lock for this long at most, and returns `None` then.
    fn try_with_log<T>(
        &self,
        kind: LockKind,
        limit: Duration,
        work: impl FnOnce(&mut Log) -> io::Result<T>,
    ) -> Result<Option<T>> {
        let failed = |what: &str, error: io::Error| {
            let message = format!("cannot {what} the store file {}", self.path.display());
            Error::io(message, error)
        };
        let Some(mut log) = self.lock_file(kind, limit)? else {
            return Ok(None);
        };
        let result = log
            .catch_up(kind)
            .and_then(|()| work(&mut log))
            .map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData => Error::new(
                    ErrorKind::Store,
                    format!("the store file {}: {error}", self.path.display()),
                ),
                _ => failed("read or write", error),
            });
        let unlocked = log.file.unlock().map_err(|error| failed("unlock", error));
        let result = result?;
        unlocked.map(|()| Some(result))
    }

    /// Takes the lock of the file, or returns `None` if it is not free within `limit`. The other threads of this
    /// process can try to take it while this waits, each until its own time-out.
    fn lock_file(&self, kind: LockKind, limit: Duration) -> Result<Option<MutexGuard<'_, Log>>> {
        let began = Instant::now();
        let mut pause = Duration::from_micros(50);
        loop {
            let log = self.lock();
            let tried = match kind {
                LockKind::Read => log.file.try_lock_shared(),
                LockKind::Write => log.file.try_lock(),
            };
            match tried {
                Ok(()) => return Ok(Some(log)),
                Err(TryLockError::Error(error)) => {
                    let message = format!("cannot lock the store file {}", self.path.display());
                    return Err(Error::io(message, error));
                }
                Err(TryLockError::WouldBlock) => {}
            }
            drop(log);
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(2));
        }
    }

    /// Writes the records that `change` returns, in one write.
    fn write(&self, change: impl FnOnce(&Table) -> Vec<(String, Vec<u8>)>) -> Result<()> {
        self.with_log(LockKind::Write, |log| {
            let records = change(&log.table);
            log.append(&records)
        })
    }

    /// Adds to the counter in the record `name`, and returns its new value.
    fn add_to_record(&self, name: &str, delta: i64) -> Result<i64> {
        let added = self.with_log(LockKind::Write, |log| {
            match sum(log.table.get(name.as_bytes()), delta) {
                Ok(count) => {
                    log.append(&[(name.to_owned(), count.to_string().into_bytes())])?;
                    Ok(Ok(count))
                }
                Err(why) => Ok(Err(why)),
            }
        })?;
        added.map_err(|why| {
            let key = name.strip_prefix('/').unwrap_or(name);
            Error::new(
                ErrorKind::Store,
                format!("cannot add {delta} to {key:?}: {why}"),
            )
        })
    }

    /// Polls the file until `look` returns a value; after `timeout`, returns the error that `timeout_error` makes.
    fn poll<T>(
        &self,
        timeout: Duration,
        mut look: impl FnMut(&Table) -> Option<T>,
        timeout_error: impl FnOnce(&Table) -> Error,
    ) -> Result<T> {
        let deadline = Instant::now().checked_add(timeout);
        let mut pause = POLL.0;
        let left = || match deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            None => timeout,
        };
        loop {
            let limit = left().min(LOCK_TIMEOUT);
            let seen = if limit < LOCK_TIMEOUT {
                // A lock that is not free by then leaves the table as it was read last.
                let seen = self.try_with_log(LockKind::Read, limit, |log| Ok(look(&log.table)))?;
                seen.flatten()
            } else {
                self.with_log(LockKind::Read, |log| Ok(look(&log.table)))?
            };
            if let Some(result) = seen {
                return Ok(result);
            }
            let left = left();
            if left.is_zero() {
                return Err(timeout_error(&self.lock().table));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(POLL.1);
        }
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        let finished = self.add_to_record(FINISHED, 1);
        let open = self.add_to_record(REFERENCES, -1);
        if let (Ok(finished), Ok(0), Some(world_size)) = (finished, open, self.world_size)
            && finished >= i64::from(world_size)
        {
            // Another process may have removed the file first.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Log {
    /// Applies the records that were appended since the last call, by this process or another. A writer also cuts off
    /// an incomplete record: it holds the exclusive lock, so nothing still writes that record.
    fn catch_up(&mut self, kind: LockKind) -> io::Result<()> {
        let end = self.file.metadata()?.len();
        if end < self.read {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it is shorter than the part that was read before: another program may have truncated it, or it was \
                 restored from a copy; start the job again with a new file",
            ));
        }
        // A file that is no store can be of any size, so it is read piece by piece, and each record is checked by its
        // beginning.
        let mut piece = PIECE;
        let mut bytes = Vec::new();
        while self.read < end {
            let length = piece.min(end - self.read);
            bytes.resize(usize::try_from(length).unwrap_or(usize::MAX), 0);
            self.file.read_exact_at(&mut bytes, self.read)?;
            let before = self.read;
            self.apply(&bytes)?;
            if self.read > before {
                piece = PIECE;
                continue;
            }
            if length == end - self.read {
                break;
            }
            // The record is longer than the piece.
            piece = piece.saturating_mul(2);
        }
        if let (true, LockKind::Write) = (self.read < end, kind) {
            if self.read == 0 && !is_beginning_of_first(&bytes) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "it does not begin with a store record: remove it, or name another file",
                ));
            }
            self.file.set_len(self.read)?;
        }
        Ok(())
    }

    /// Applies the complete records at the beginning of `bytes`, which are those of the file from `read` on.
    fn apply(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while let Some(begin) = rest.get(..5) {
            let is_record = match begin {
                [0, 0, 0, 0, _] => false,
                [_, _, _, _, b'/' | b'-'] => true,
                _ => [REFERENCES, FINISHED].iter().any(|name| {
                    let length = (name.len() as u32).to_le_bytes();
                    rest.starts_with(&length) && begins_alike(&rest[4..], name.as_bytes())
                }),
            };
            if !is_record {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!(
                        "it holds something other than a store record at byte {}: remove it, or name another file",
                        self.read
                    ),
                ));
            }
            let Some((name, value, after)) = split_record(rest) else {
                break;
            };
            match name {
                [b'-', removed @ ..] => {
                    self.table.delete(removed);
                }
                _ => self.table.set(name, value),
            }
            self.read += (rest.len() - after.len()) as u64;
            rest = after;
        }
        Ok(())
    }

    /// Writes these records to the end of the file, and applies them.
    fn append(&mut self, records: &[(String, Vec<u8>)]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for (name, value) in records {
            for part in [name.as_bytes(), value] {
                let length = u32::try_from(part.len()).map_err(|_| {
                    io::Error::new(
                        io::ErrorKind::InvalidInput,
                        "a key or value has 4 GiB or more; the limit is 4,294,967,295 bytes",
                    )
                })?;
                bytes.extend_from_slice(&length.to_le_bytes());
                bytes.extend_from_slice(part);
            }
        }
        io::Write::write_all(&mut self.file, &bytes)?;
        self.catch_up(LockKind::Read)
    }
}

/// Whether the shorter of two is the beginning of the longer.
fn begins_alike(one: &[u8], other: &[u8]) -> bool {
    one.iter().zip(other).all(|(one, other)| one == other)
}

/// Whether these bytes may be the rest of the first record of a store whose writer was killed: the record of the
/// counter of references, as rcomm and PyTorch write it.
fn is_beginning_of_first(bytes: &[u8]) -> bool {
    let mut first = (REFERENCES.len() as u32).to_le_bytes().to_vec();
    first.extend_from_slice(REFERENCES.as_bytes());
    // The length of the value, and its text: at most 19 digits and a sign.
    let longest = first.len() + 4 + 20;
    bytes.len() < longest && begins_alike(bytes, &first)
}

/// The first record of `bytes` (name, value) and the bytes after it, if the record is complete.
fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (name, rest) = split_part(bytes)?;
    let (value, rest) = split_part(rest)?;
    Some((name, value, rest))
}

/// The first key or value of `bytes` and the bytes after it, if it is complete.
fn split_part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

fn record_name(key: &str) -> String {
    format!("/{key}")
}

fn missing<'a>(table: &Table, keys: &[&'a str]) -> Vec<&'a str> {
    keys.iter()
        .filter(|key| !table.has(record_name(key).as_bytes()))
        .copied()
        .collect()
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.write(|_| vec![(record_name(key), value.to_vec())])
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.poll(
            timeout,
            |table| table.get(record_name(key).as_bytes()).map(<[u8]>::to_vec),
            |_| timed_out([key], timeout),
        )
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.add_to_record(&record_name(key), delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let name = record_name(key);
        self.with_log(LockKind::Write, |log| {
            Ok(match log.table.compare(name.as_bytes(), expected) {
                Compared::Equal => {
                    log.append(&[(name, desired.to_vec())])?;
                    desired.to_vec()
                }
                Compared::Differs => log.table.get(name.as_bytes()).unwrap_or_default().to_vec(),
                Compared::Absent => expected.to_vec(),
            })
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.poll(
            timeout,
            |table| missing(table, keys).is_empty().then_some(()),
            |table| timed_out(missing(table, keys), timeout),
        )
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.with_log(LockKind::Read, |log| {
            Ok(missing(&log.table, keys).is_empty())
        })
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.with_log(LockKind::Write, |log| {
            let is_present = log.table.has(record_name(key).as_bytes());
            if is_present {
                log.append(&[(format!("-{}", record_name(key)), Vec::new())])?;
            }
            Ok(is_present)
        })
    }

    fn num_keys(&self) -> Result<u64> {
        Ok(self.list_keys()?.len() as u64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.with_log(LockKind::Read, |log| {
            let user_keys = log.table.keys().filter_map(|name| name.strip_prefix(b"/"));
            Ok(user_keys
                .map(|key| String::from_utf8_lossy(key).into_owned())
                .collect())
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.write(|table| {
            let name = record_name(key);
            let held = table.get(name.as_bytes()).unwrap_or_default();
            let joined = [held, value].concat();
            vec![(name, joined)]
        })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.poll(
            timeout,
            |table| {
                keys.iter()
                    .map(|key| table.get(record_name(key).as_bytes()).map(<[u8]>::to_vec))
                    .collect()
            },
            |table| timed_out(missing(table, keys), timeout),
        )
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.write(|_| {
            pairs
                .iter()
                .map(|(key, value)| (record_name(key), value.to_vec()))
                .collect()
        })
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        let arrived = |table: &Table| sum(table.get(record_name(key).as_bytes()), 0).unwrap_or(0);
        self.add(key, 1)?;
        self.poll(
            timeout,
            |table| (arrived(table) >= i64::from(world_size)).then_some(()),
            |table| barrier_timed_out(key, Some(arrived(table)), world_size, timeout),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_and_path() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        (folder, path)
    }

    #[test]
    fn a_caller_waits_for_the_files_lock_until_its_own_time_out_only() {
        let (_folder, path) = folder_and_path();
        let store = FileStore::open(&path, None).unwrap();
        let holder = OpenOptions::new().write(true).open(&path).unwrap();
        holder.lock().unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| store.set("a", b"1"));
            // The writer waits for a minute, this call does not.
            let began = Instant::now();
            for _ in 0..20 {
                let error = store.get("a", Duration::from_millis(5)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout);
            }
            assert!(began.elapsed() < LOCK_TIMEOUT / 2);
            assert!(!writer.is_finished());
            holder.unlock().unwrap();
            writer.join().unwrap().unwrap();
        });
        assert_eq!(store.get("a", Duration::ZERO).unwrap(), b"1");
    }

    #[test]
    fn a_first_record_that_was_cut_is_written_anew() {
        let (_folder, path) = folder_and_path();
        drop(FileStore::open(&path, None).unwrap());
        let whole = std::fs::read(&path).unwrap();
        let first = 4 + REFERENCES.len() + 4 + 1;
        for length in 1..first {
            std::fs::write(&path, &whole[..length]).unwrap();
            let store = FileStore::open(&path, None).unwrap();
            store.set("a", b"1").unwrap();
            assert_eq!(store.list_keys().unwrap(), ["a"], "{length} bytes");
        }
        // A later record that was cut goes, and those before it stay.
        let store = FileStore::open(&path, None).unwrap();
        store.set("b", &[7; 100]).unwrap();
        let length = std::fs::metadata(&path).unwrap().len();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(length - 1).unwrap();
        let again = FileStore::open(&path, None).unwrap();
        assert_eq!(again.list_keys().unwrap(), ["a"]);
    }

    #[test]
    fn a_file_that_is_no_store_is_refused_by_its_beginning() {
        let (_folder, path) = folder_and_path();
        let refused = |path: &Path| {
            let error = FileStore::open(path, None).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Store);
            error.to_string()
        };
        std::fs::write(&path, b"abc").unwrap();
        assert!(refused(&path).contains("does not begin with a store record"));
        std::fs::write(&path, b"some words of another program").unwrap();
        assert!(refused(&path).contains("at byte 0"));
        // Larger than any memory.
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 42).unwrap();
        assert!(refused(&path).contains("at byte 0"));
    }

    #[test]
    fn records_longer_than_a_piece_are_read_whole() {
        let (_folder, path) = folder_and_path();
        let store = FileStore::open(&path, None).unwrap();
        let long = vec![5; 3 * PIECE as usize];
        store
            .multi_set(&[("a", b"1"), ("long", &long), ("b", b"2")])
            .unwrap();
        let other = FileStore::open(&path, None).unwrap();
        let read = other
            .multi_get(&["a", "long", "b"], Duration::ZERO)
            .unwrap();
        assert_eq!(read, [b"1".to_vec(), long, b"2".to_vec()]);
    }
}

//! What the threads of this process wait in, seen by the process itself: `GET /threads` of an endpoint.
//!
//! No thread is stopped, traced or sent a signal: a signal ends some system calls with `EINTR` whatever its flags
//! (`poll`, `nanosleep` and others, signal(7)), also in code that does not expect it. For each thread, the system
//! reports whether it sleeps, in which call, and where its stack is. The stack and the code are read through
//! `/proc/self/mem`: where memory is unmapped, such a read fails, while a direct access would end the process.
//!
//! Every word on the stack that points behind a call instruction of a mapped file counts as a caller. So the callers
//! are all there as far as the stack is read, innermost first, with others between them that are left over from calls
//! that have returned.

use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

/// The most threads that are looked at.
const MAX_THREADS: usize = 1024;
/// The most bytes of a stack that are read.
const STACK_BYTES: usize = 32 << 10;
/// The most callers of a thread.
const MAX_CALLERS: usize = 64;
/// The longest call instruction that is known.
const CALL_BYTES: usize = 7;

/// A thread of the process, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnThread {
    /// The system's number of the thread.
    pub tid: u32,
    /// The thread's name, as the system has it: 15 bytes at most.
    pub name: String,
    /// `R` = runs or is ready to, `S` = sleeps, `D` = waits in the kernel and cannot be interrupted, and others of
    /// proc(5).
    pub state: String,
    /// The kernel function in which the thread sleeps; empty if it does not sleep, or if the system does not say.
    pub kernel_function: String,
    /// The number, on this machine's architecture, of the system call in which the thread sleeps; `None` if it runs, or
    /// sleeps outside of a system call.
    pub system_call: Option<i64>,
    /// Where the thread's code has called the system; `None` if the thread runs, or if that code was not mapped from a
    /// file.
    pub at: Option<CodeAddress>,
    /// The probable callers of that code, innermost first; empty if the thread runs, or continued while its stack was
    /// read.
    pub probable_callers: Vec<CodeAddress>,
}

/// A place in the code of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeAddress {
    /// The file from which the code was mapped.
    pub module: String,
    /// The address relative to where that file was mapped: what `addr2line -f -e MODULE OFFSET` takes for libraries
    /// and position-independent programs.
    pub offset: u64,
    /// The address in the process.
    pub address: u64,
}

/// The threads of this process, in the order of their numbers.
///
/// # Blocking
/// For the time of a few system calls for each thread, and a few hundred for each that sleeps.
///
/// # Errors
/// If the system does not show the process its own threads, code or memory.
pub fn own_threads() -> io::Result<Vec<OwnThread>> {
    let code = Code::of_process()?;
    let memory = File::open("/proc/self/mem")?;
    let tids = fs::read_dir("/proc/self/task")?.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse::<u32>().ok()
    });
    let mut tids: Vec<u32> = tids.take(MAX_THREADS).collect();
    tids.sort_unstable();
    Ok(tids
        .into_iter()
        .map(|tid| one_thread(tid, &code, &memory))
        .collect())
}

/// Looks at one thread.
fn one_thread(tid: u32, code: &Code, memory: &File) -> OwnThread {
    // A thread that has ended since then has no files: only its number is shown.
    let read = |file: &str| {
        let text = fs::read_to_string(format!("/proc/self/task/{tid}/{file}"));
        text.unwrap_or_default().trim().to_owned()
    };
    let wchan = read("wchan");
    let mut thread = OwnThread {
        tid,
        name: read("comm"),
        state: state(&read("stat")).to_owned(),
        kernel_function: match wchan.as_str() {
            "0" => String::new(),
            _ => wchan,
        },
        ..OwnThread::default()
    };
    let Some(sleep) = Sleep::parse(&read("syscall")) else {
        return thread;
    };
    thread.system_call = (sleep.number >= 0).then_some(sleep.number);
    thread.at = code.find(sleep.instruction);
    let callers = code.callers(&stack(memory, sleep.stack), memory);
    if Sleep::parse(&read("syscall")) == Some(sleep) {
        thread.probable_callers = callers;
    }
    thread
}

/// The state in the text of `stat`, which follows the name in parentheses.
fn state(stat: &str) -> &str {
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    rest.split_whitespace().next().unwrap_or_default()
}

/// Where a thread sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sleep {
    /// The number of the system call; -1 outside of one.
    number: i64,
    /// The address of the newest word of the stack.
    stack: u64,
    /// The address of the next instruction.
    instruction: u64,
}

impl Sleep {
    /// Parses the text of `syscall`; `None` if the thread runs.
    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [number, .., stack, instruction] = words[..] else {
            return None;
        };
        let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
        Some(Self {
            number: number.parse().ok()?,
            stack: hex(stack)?,
            instruction: hex(instruction)?,
        })
    }
}

/// The newest part of a stack.
fn stack(memory: &File, from: u64) -> Vec<u64> {
    let mut bytes = vec![0; STACK_BYTES];
    let mut filled = 0;
    // A read ends where the mapping does: the stack may be shorter.
    while filled < bytes.len() {
        match memory.read_at(&mut bytes[filled..], from + filled as u64) {
            Ok(0) | Err(_) => break,
            Ok(count) => filled += count,
        }
    }
    let words = bytes[..filled].chunks_exact(8);
    words
        .map(|word| {
            word.iter()
                .rev()
                .fold(0, |value, &byte| value << 8 | u64::from(byte))
        })
        .collect()
}

/// A mapping with code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Segment {
    start: u64,
    end: u64,
    /// Index into [`Code::modules`].
    module: usize,
}

/// The code that is mapped from files.
#[derive(Debug, Default)]
struct Code {
    /// The segments, in ascending order of addresses.
    segments: Vec<Segment>,
    /// The path of each file, and the address relative to which its code is mapped.
    modules: Vec<(String, u64)>,
}

impl Code {
    fn of_process() -> io::Result<Self> {
        Ok(Self::parse(&fs::read_to_string("/proc/self/maps")?))
    }

    /// Parses the text of `maps`. Lines that are malformed, or of mappings without a file, are left out.
    fn parse(maps: &str) -> Self {
        let mut code = Self::default();
        let mut known: HashMap<&str, usize> = HashMap::new();
        for line in maps.lines() {
            let mut words = line.splitn(6, ' ');
            let (Some(range), Some(access), Some(offset)) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let path = words.nth(2).unwrap_or_default().trim_start();
            let hex = |text: &str| u64::from_str_radix(text, 16).ok();
            let bounds = range
                .split_once('-')
                .and_then(|(start, end)| Some((hex(start)?, hex(end)?)));
            let (Some((start, end)), Some(offset)) = (bounds, hex(offset)) else {
                continue;
            };
            if !path.starts_with('/') {
                continue;
            }
            let modules = &mut code.modules;
            let module = *known.entry(path).or_insert_with(|| {
                modules.push((path.to_owned(), start.wrapping_sub(offset)));
                modules.len() - 1
            });
            if access.contains('x') {
                code.segments.push(Segment { start, end, module });
            }
        }
        code
    }

    /// The segment that contains this address.
    fn segment(&self, address: u64) -> Option<&Segment> {
        let after = self
            .segments
            .partition_point(|segment| segment.start <= address);
        let segment = self.segments.get(after.checked_sub(1)?)?;
        (address < segment.end).then_some(segment)
    }

    /// The place of this address in its file; `None` if no code is mapped there.
    fn find(&self, address: u64) -> Option<CodeAddress> {
        let (module, base) = &self.modules[self.segment(address)?.module];
        Some(CodeAddress {
            module: module.clone(),
            offset: address.wrapping_sub(*base),
            address,
        })
    }

    /// The words of a stack that are addresses directly behind a call instruction, at most [`MAX_CALLERS`].
    fn callers(&self, stack: &[u64], memory: &File) -> Vec<CodeAddress> {
        let behind_call = |address: u64| {
            let segment = self.segment(address)?;
            let from = address.checked_sub(CALL_BYTES as u64)?;
            let mut bytes = [0; CALL_BYTES];
            if from < segment.start {
                return None;
            }
            memory.read_exact_at(&mut bytes, from).ok()?;
            ends_with_call(&bytes).then(|| self.find(address)).flatten()
        };
        let callers = stack.iter().filter_map(|&word| behind_call(word));
        callers.take(MAX_CALLERS).collect()
    }
}

/// Whether these bytes may end with an instruction that calls.
#[cfg(target_arch = "x86_64")]
fn ends_with_call(bytes: &[u8; CALL_BYTES]) -> bool {
    // CALL rel32 is E8 and four bytes; CALL r/m64 is FF, a byte whose middle bits are 2, and the rest of the operand
    // (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, "CALL").
    let near = bytes[CALL_BYTES - 5] == 0xE8;
    let indirect = [2, 3, 4, 6, 7].iter().any(|&length| {
        let start = CALL_BYTES - length;
        bytes[start] == 0xFF && bytes[start + 1] >> 3 & 7 == 2
    });
    near || indirect
}

/// Whether these bytes may end with an instruction that calls.
#[cfg(target_arch = "aarch64")]
fn ends_with_call(bytes: &[u8; CALL_BYTES]) -> bool {
    // BL and BLR (Arm Architecture Reference Manual for A-profile, C6.2).
    let [.., a, b, c, d] = *bytes;
    let word = u32::from_le_bytes([a, b, c, d]);
    word & 0xFC00_0000 == 0x9400_0000 || word & 0xFFFF_FC1F == 0xD63F_0000
}

/// No call instruction of this architecture is known.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn ends_with_call(_: &[u8; CALL_BYTES]) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_the_system_are_parsed() {
        let sleep = Sleep::parse("202 0x1 0x0 0x0 0x0 0x0 0x0 0x7ffd0 0x7f01");
        let expected = Sleep {
            number: 202,
            stack: 0x7_ffd0,
            instruction: 0x7f01,
        };
        assert_eq!(sleep, Some(expected));
        assert_eq!(
            Sleep::parse("-1 0x10 0x20").map(|sleep| sleep.number),
            Some(-1)
        );
        assert_eq!(Sleep::parse("running"), None);
        assert_eq!(Sleep::parse(""), None);
        assert_eq!(state("7 (a ) b) S 1 7"), "S");
        assert_eq!(state(""), "");

        let code = Code::parse(
            "1000-2000 r--p 00000000 fe:00 7                          /usr/lib/a b.so\n\
             2000-4000 r-xp 00001000 fe:00 7                          /usr/lib/a b.so\n\
             8000-9000 rw-p 00000000 00:00 0\n\
             9000-a000 r-xp 00000000 00:00 0                          [vdso]\n\
             not a line\n",
        );
        let found = code.find(0x2345).unwrap();
        assert_eq!(
            (found.module.as_str(), found.offset),
            ("/usr/lib/a b.so", 0x1345)
        );
        for outside in [0x1500, 0x1fff, 0x4000, 0x8800, 0x9800, u64::MAX] {
            assert_eq!(code.find(outside), None, "{outside:x}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn calls_are_distinguished_from_other_instructions() {
        assert!(ends_with_call(&[0x90, 0x90, 0xE8, 1, 2, 3, 4]));
        // call rax; call [rbx+8]; call [rip+4].
        assert!(ends_with_call(&[0x90, 0x90, 0x90, 0x90, 0x90, 0xFF, 0xD0]));
        assert!(ends_with_call(&[0x90, 0x90, 0x90, 0x90, 0xFF, 0x53, 0x08]));
        assert!(ends_with_call(&[0x90, 0xFF, 0x15, 4, 0, 0, 0]));
        // jmp rax; push rax.
        assert!(!ends_with_call(&[0x90, 0x90, 0x90, 0x90, 0x90, 0xFF, 0xE0]));
        assert!(!ends_with_call(&[0x90; 7]));
    }

    #[inline(never)]
    fn sleeps_here(gate: &std::sync::Mutex<()>) {
        drop(std::hint::black_box(gate.lock()));
        // Not a tail call, which would leave no address of this function.
        std::hint::black_box(());
    }

    #[test]
    fn a_sleeping_thread_is_shown_with_the_code_that_it_sleeps_in() {
        let gate = std::sync::Mutex::new(());
        let held = gate.lock();
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("sleeps".to_owned());
            let sleeper = thread.spawn_scoped(scope, || sleeps_here(&gate)).unwrap();
            let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
            let from = sleeps_here as fn(&std::sync::Mutex<()>) as usize as u64;
            loop {
                let threads = own_threads().unwrap();
                let found = threads.iter().find(|thread| thread.name == "sleeps");
                let is_there = found.is_some_and(|thread| {
                    let mut callers = thread.probable_callers.iter();
                    let is_inside = callers.any(|call| (from..from + 1024).contains(&call.address));
                    thread.state == "S" && thread.at.is_some() && is_inside
                });
                if is_there {
                    assert!(found.unwrap().system_call.is_some());
                    break;
                }
                assert!(std::time::Instant::now() < until, "{threads:#?}");
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            drop(held);
            sleeper.join().unwrap();
        });
    }
}

//! Bytes from one process to another by the ways that there are: the slots of memory that both share, a
//! registered buffer, and cross-memory attach (`process_vm_readv`), which this backend does not use.
//!
//! `cargo bench -p rcomm --bench cross_memory`. Two processes: this program, and itself as rank 1, which
//! measures a broadcast of rank 0's bytes by slots and out of a registered buffer, and then the system call
//! alone, from the same ordinary buffer, without any of the words by which ranks would have to agree on it.
//! Printed are medians, and how many times the slots' the system call takes.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../tests/job/mod.rs"]
mod job;

use job::{DEADLINE, Group, Rank};
use rcomm::{Buffer, Config, DType, Op};
use std::path::Path;
use std::time::Instant;

const SIZES: [usize; 6] = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20];
const MOST: usize = SIZES[SIZES.len() - 1];

/// One of the two, on a processor of its own.
struct Bench {
    group: Group,
    rank: Rank,
}

impl Bench {
    fn new(folder: &Path, rank: u32) -> Self {
        let mut set = rustix::thread::CpuSet::new();
        set.set(rank as usize);
        // Without it the times are those of wherever the system puts the two.
        let _ = rustix::thread::sched_setaffinity(None, &set);
        let rank = Rank::open(folder, (rank, 2), Config::default());
        let group = rank.connect(1);
        Self { rank, group }
    }

    /// The median time of a broadcast of so many bytes.
    fn broadcast(&mut self, bytes: &mut [u8], times: usize) -> f64 {
        let mut taken: Vec<f64> = (0..times)
            .map(|_| {
                self.group.run(&mut Op::Barrier).unwrap();
                let then = Instant::now();
                let mut op = Op::Broadcast {
                    buffer: Buffer::from_mut(bytes),
                    root: 0,
                };
                self.group.run(&mut op).unwrap();
                then.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        median(&mut taken)
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Reads another process's memory by the system call.
fn read_across(pid: i32, at: usize, into: &mut [u8]) -> std::io::Result<usize> {
    let own = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let other = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(at),
        iov_len: into.len(),
    };
    // SAFETY: `own` is an exclusive slice; `other` is an address in another process, which the system checks.
    let read = unsafe { libc::process_vm_readv(pid, &own, 1, &other, 1, 0) };
    usize::try_from(read).map_err(|_| std::io::Error::last_os_error())
}

fn measure(mut bench: Bench) {
    let number = bench.rank.rank;
    let mut own = vec![number as u8 + 1; MOST];
    let mut registered = bench.group.backend.allocate(DType::U8, MOST).unwrap();
    registered
        .as_mut_slice::<u8>()
        .unwrap()
        .fill(number as u8 + 1);
    if number == 0 {
        let told = format!("{} {}", std::process::id(), own.as_ptr().addr());
        bench.rank.store.set("where", told.as_bytes()).unwrap();
    }
    let told = bench.rank.store.get("where", DEADLINE).unwrap();
    let told = String::from_utf8(told).unwrap();
    let (pid, at) = told.split_once(' ').unwrap();
    let (pid, at): (i32, usize) = (pid.parse().unwrap(), at.parse().unwrap());
    for bytes in SIZES {
        let times = ((256 << 20) / bytes).clamp(9, 2000);
        bench.broadcast(&mut own[..bytes], times / 4 + 1);
        let slots = bench.broadcast(&mut own[..bytes], times);
        let registered = &mut registered.as_mut_slice::<u8>().unwrap()[..bytes];
        bench.broadcast(registered, times / 4 + 1);
        let direct = bench.broadcast(registered, times);
        let mut attach = Ok(0.0);
        if number == 1 {
            let mut taken = Vec::new();
            for _ in 0..times {
                let then = Instant::now();
                let read = read_across(pid, at, &mut own[..bytes]);
                taken.push(then.elapsed().as_secs_f64() * 1e6);
                attach = read.map(|read| assert_eq!(read, bytes)).map(|()| 0.0);
                if attach.is_err() {
                    break;
                }
            }
            assert!(own[..bytes].iter().all(|&byte| byte == 1));
            match attach {
                Ok(_) => {
                    let attach = median(&mut taken);
                    println!(
                        "{bytes:>9} bytes: slots {slots:>9.2} us, registered {direct:>9.2}, \
                         process_vm_readv {attach:>9.2} = {:.2} times the slots'",
                        attach / slots
                    );
                }
                Err(error) => println!(
                    "{bytes:>9} bytes: slots {slots:>9.2} us, registered {direct:>9.2}; \
                     skipped: process_vm_readv: {error}"
                ),
            }
        }
        bench.group.run(&mut Op::Barrier).unwrap();
    }
}

fn main() {
    if let Some((folder, rank)) = job::own_part() {
        measure(Bench::new(&folder, rank));
        return;
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        // Run among tests, where nobody looks at times.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut other = job::rank_of(folder.path(), 1).spawn().unwrap();
    measure(Bench::new(folder.path(), 0));
    assert!(other.wait().unwrap().success());
}

//! Bytes from one process to another by the ways that there are: the slots of memory that both share, a
//! registered buffer, and cross-memory attach (`process_vm_readv`), which this backend does not use.
//!
//! `cargo bench -p rcomm --bench cross_memory`. Two processes: this program, and itself as rank 1, which
//! measures a broadcast of rank 0's bytes by slots and out of a registered buffer, and then the system call
//! alone, from the same ordinary buffer, without any of the words by which ranks would have to agree on it.
//! Printed are medians, and how many times the slots' the system call takes.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use rcomm::backend::cpu::CpuFactory;
use rcomm::backend::{BackendFactory, Call, GroupContext, Observer, WorldContext};
use rcomm::{
    Backend, Buffer, Config, DType, Deadline, FileStore, Hints, Op, ProcessGroupInfo, Secret, Store,
};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZES: [usize; 6] = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20];
const MOST: usize = SIZES[SIZES.len() - 1];
const DEADLINE: Duration = Duration::from_secs(60);

struct Deaf;
impl Observer for Deaf {
    fn started(&self) {}
    fn ended(&self) {}
}

struct Rank {
    rank: u32,
    turn: u64,
    store: Arc<dyn Store>,
    backend: Arc<dyn Backend>,
    _factory: CpuFactory,
}

impl Rank {
    fn new(folder: &Path, rank: u32) -> Self {
        let mut set = rustix::thread::CpuSet::new();
        set.set(rank as usize);
        // Without it the times are those of wherever the system puts the two.
        let _ = rustix::thread::sched_setaffinity(None, &set);
        let store = FileStore::open(folder.join("store"), None);
        let store: Arc<dyn Store> = Arc::new(store.unwrap());
        let world = WorldContext {
            rank,
            world_size: 2,
            local_rank: Some(rank),
            local_world_size: Some(2),
            job: "bench".into(),
            attempt: 0,
            store: store.clone(),
            secret: Secret::from_text("bench"),
            config: Arc::new(Config::default()),
        };
        let factory = CpuFactory::open(&world).unwrap();
        let group = GroupContext {
            info: ProcessGroupInfo {
                id: 0,
                name: "world".into(),
                desc: "world".into(),
                ranks: vec![0, 1].into(),
            },
            group_rank: rank,
            wire_id: 1,
            store: store.clone(),
        };
        let backend = factory.connect(group, DEADLINE.into()).unwrap();
        Self {
            rank,
            turn: 0,
            store,
            backend,
            _factory: factory,
        }
    }

    fn run(&mut self, op: &mut Op<'_>) {
        self.turn += 1;
        let call = Call {
            seq: self.turn,
            turn: self.turn,
            deadline: Deadline::In(DEADLINE),
            hints: Hints::NONE,
        };
        self.backend.run(op, call, &Deaf).unwrap();
    }

    /// The median time of a broadcast of so many bytes.
    fn broadcast(&mut self, bytes: &mut [u8], times: usize) -> f64 {
        let mut taken: Vec<f64> = (0..times)
            .map(|_| {
                self.run(&mut Op::Barrier);
                let then = Instant::now();
                self.run(&mut Op::Broadcast {
                    buffer: Buffer::from_mut(bytes),
                    root: 0,
                });
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

fn measure(mut rank: Rank) {
    let mut own = vec![rank.rank as u8 + 1; MOST];
    let mut registered = rank.backend.allocate(DType::U8, MOST).unwrap();
    registered
        .as_mut_slice::<u8>()
        .unwrap()
        .fill(rank.rank as u8 + 1);
    if rank.rank == 0 {
        let told = format!("{} {}", std::process::id(), own.as_ptr().addr());
        rank.store.set("where", told.as_bytes()).unwrap();
    }
    let told = rank.store.get("where", DEADLINE).unwrap();
    let told = String::from_utf8(told).unwrap();
    let (pid, at) = told.split_once(' ').unwrap();
    let (pid, at): (i32, usize) = (pid.parse().unwrap(), at.parse().unwrap());
    for bytes in SIZES {
        let times = ((256 << 20) / bytes).clamp(9, 2000);
        rank.broadcast(&mut own[..bytes], times / 4 + 1);
        let slots = rank.broadcast(&mut own[..bytes], times);
        let registered = &mut registered.as_mut_slice::<u8>().unwrap()[..bytes];
        rank.broadcast(registered, times / 4 + 1);
        let direct = rank.broadcast(registered, times);
        let mut attach = Ok(0.0);
        if rank.rank == 1 {
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
        rank.run(&mut Op::Barrier);
    }
}

fn main() {
    if let Ok(folder) = std::env::var("CROSS_MEMORY_FOLDER") {
        measure(Rank::new(Path::new(&folder), 1));
        return;
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        // Run among tests, where nobody looks at times.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap())
        .env("CROSS_MEMORY_FOLDER", folder.path())
        .spawn()
        .unwrap();
    measure(Rank::new(folder.path(), 0));
    assert!(other.wait().unwrap().success());
}

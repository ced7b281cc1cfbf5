//! Processes that the system allows no huge pages, or no memory that others can map: they go on with what
//! there is, and say so once.
//!
//! Ranks are processes: this test starts itself once for each, which then has the system refuse the call by
//! a filter (seccomp).
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use rcomm::backend::cpu::CpuFactory;
use rcomm::backend::{BackendFactory, Call, GroupContext, Observer, WorldContext};
use rcomm::{
    Backend, Buffer, Config, DType, Deadline, FileStore, Hints, Op, ProcessGroupInfo, ReduceOp,
    Secret, Store,
};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const RANKS: u32 = 2;
const COUNT: usize = 100_000;
const DEADLINE: Duration = Duration::from_secs(60);
/// What a child says where there are no filters.
const NO_FILTER: &str = "no filter";

struct Deaf;
impl Observer for Deaf {
    fn started(&self) {}
    fn ended(&self) {}
}

/// Has this thread, and those that it starts, get `errno` for a call, if its third argument is this one.
fn refuse(call: i64, third: Option<u32>, errno: i32) -> std::io::Result<()> {
    // Offsets in `struct seccomp_data`.
    const NUMBER: u32 = 0;
    const THIRD_ARGUMENT: u32 = 32;
    let load = |at| libc::sock_filter {
        code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        jt: 0,
        jf: 0,
        k: at,
    };
    let skip_unless = |value, skipped| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: 0,
        jf: skipped,
        k: value,
    };
    let answer = |what| libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: what,
    };
    let refusal = answer(libc::SECCOMP_RET_ERRNO | errno as u32);
    let mut program = match third {
        None => vec![load(NUMBER), skip_unless(call as u32, 1), refusal],
        Some(third) => vec![
            load(NUMBER),
            skip_unless(call as u32, 3),
            load(THIRD_ARGUMENT),
            skip_unless(third, 1),
            refusal,
        ],
    };
    program.push(answer(libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the arguments are those that `prctl` documents for these requests; the filter is read during
    // the call.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) != 0
        {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

fn connect(folder: &Path, rank: u32) -> (CpuFactory, Arc<dyn Backend>) {
    let store = FileStore::open(folder.join("store"), None);
    let store: Arc<dyn Store> = Arc::new(store.unwrap());
    let world = WorldContext {
        rank,
        world_size: RANKS,
        local_rank: Some(rank),
        local_world_size: Some(RANKS),
        job: "refused".into(),
        attempt: 0,
        store: store.clone(),
        secret: Secret::from_text("refused"),
        config: Arc::new(Config::default()),
    };
    let factory = CpuFactory::open(&world).unwrap();
    let group = GroupContext {
        info: ProcessGroupInfo {
            id: 0,
            name: "world".into(),
            desc: "world".into(),
            ranks: (0..RANKS).collect(),
        },
        group_rank: rank,
        wire_id: 1,
        store,
    };
    let backend = factory.connect(group, DEADLINE.into()).unwrap();
    (factory, backend)
}

/// What a child does; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Ok(folder) = std::env::var("CPU_REFUSED_FOLDER") else {
        return;
    };
    let variable = |name: &str| std::env::var(name).unwrap();
    let rank: u32 = variable("CPU_REFUSED_RANK").parse().unwrap();
    let refused = variable("CPU_REFUSED_WHAT");
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    if refused == "huge pages" {
        let advice = libc::MADV_HUGEPAGE as u32;
        if let Err(error) = refuse(libc::SYS_madvise, Some(advice), libc::EINVAL) {
            eprintln!("{NO_FILTER}: {error}");
            return;
        }
    }
    let (_factory, backend) = connect(Path::new(&folder), rank);
    // The ranks share memory by now, whoever may make no more.
    if refused == "memory"
        && rank == 1
        && let Err(error) = refuse(libc::SYS_memfd_create, None, libc::EPERM)
    {
        eprintln!("{NO_FILTER}: {error}");
        return;
    }
    let mut run = {
        let mut turn = 0;
        move |op: &mut Op<'_>| {
            turn += 1;
            let call = Call {
                seq: turn,
                turn,
                deadline: Deadline::In(DEADLINE),
                hints: Hints::NONE,
            };
            backend.run(op, call, &Deaf).unwrap();
            backend.clone()
        }
    };
    for _ in 0..3 {
        let backend = run(&mut Op::Barrier);
        let mut buffer = backend.allocate(DType::F32, COUNT).unwrap();
        buffer.as_mut_slice().unwrap().fill(rank as f32 + 1.0);
        run(&mut Op::AllReduce {
            buffer: buffer.lend(),
            op: ReduceOp::Sum.into(),
        });
        let sums: &[f32] = buffer.as_slice().unwrap();
        assert!(sums.iter().all(|&sum| sum == 3.0));
        let mut own = vec![1f32; COUNT];
        run(&mut Op::AllReduce {
            buffer: Buffer::from_mut(&mut own),
            op: ReduceOp::Max.into(),
        });
    }
    // Nobody leaves while another still reads.
    run(&mut Op::Barrier);
}

/// What the ranks said on standard error; `None` if this system has no filters.
fn said(refused: &str) -> Option<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "rank_process", "--nocapture"])
                .env("CPU_REFUSED_FOLDER", folder.path())
                .env("CPU_REFUSED_RANK", rank.to_string())
                .env("CPU_REFUSED_WHAT", refused)
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let outputs = ranks
        .into_iter()
        .map(|child| child.wait_with_output().unwrap());
    let outputs: Vec<_> = outputs.collect();
    let said = |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();
    if let Some(why) = outputs
        .iter()
        .map(said)
        .find(|said| said.contains(NO_FILTER))
    {
        eprintln!("skipped: no system call can be refused here: {why}");
        return None;
    }
    for (rank, output) in outputs.iter().enumerate() {
        let ended = output.status;
        assert!(ended.success(), "rank {rank}: {ended}: {}", said(output));
    }
    Some(outputs.iter().map(said).collect())
}

#[test]
fn ranks_without_huge_pages_have_small_ones_and_say_so_once() {
    let Some(said) = said("huge pages") else {
        return;
    };
    for (rank, said) in said.iter().enumerate() {
        let times = said.matches("huge pages were refused").count();
        assert_eq!(times, 1, "rank {rank}: {said}");
        assert!(!said.contains("ordinary memory"), "rank {rank}: {said}");
    }
}

#[test]
fn a_rank_that_may_make_no_shared_memory_allocates_ordinary_memory_and_says_so_once() {
    let Some(said) = said("memory") else { return };
    let times: Vec<usize> = said
        .iter()
        .map(|said| said.matches("what is allocated is ordinary memory").count())
        .collect();
    assert_eq!(times, [0, 1], "{said:?}");
}

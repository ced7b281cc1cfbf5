//! Processes to which the system refuses huge pages, or memory that others can map: they continue without it and log
//! the refusal once.
//!
//! Ranks are processes: this program starts itself once for each rank; a rank's process installs a filter (seccomp)
//! that makes the system call for such memory fail.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod job;

use job::Rank;
use rcomm::{Buffer, Config, DType, Op, ReduceOp};
use std::process::Stdio;

const RANKS: u32 = 2;
const COUNT: usize = 100_000;
/// What a rank's process prints if it cannot install a filter.
const NO_FILTER: &str = "no filter";

/// Makes a system call fail with `errno` in this thread and in those that it starts from now on; if `third` is given,
/// only calls with this third argument.
fn refuse(call: i64, third: Option<u32>, errno: i32) -> std::io::Result<()> {
    // Offsets in `struct seccomp_data`.
    const NUMBER: u32 = 0;
    const THIRD_ARGUMENT: u32 = 32;
    let load = |offset| libc::sock_filter {
        code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        jt: 0,
        jf: 0,
        k: offset,
    };
    let skip_unless = |value, skipped| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: 0,
        jf: skipped,
        k: value,
    };
    let ret = |action| libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: action,
    };
    let refusal = ret(libc::SECCOMP_RET_ERRNO | errno as u32);
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
    program.push(ret(libc::SECCOMP_RET_ALLOW));
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

/// The body of a rank's process; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Some((folder, rank)) = job::folder_and_rank() else {
        return;
    };
    let refused = std::env::var("CPU_REFUSED_WHAT").unwrap();
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
    let this_rank = Rank::open(&folder, (rank, RANKS), Config::default());
    let mut group = this_rank.connect(1);
    // The ranks share memory already. From here on rank 1 cannot make more of it.
    if refused == "memory"
        && rank == 1
        && let Err(error) = refuse(libc::SYS_memfd_create, None, libc::EPERM)
    {
        eprintln!("{NO_FILTER}: {error}");
        return;
    }
    for _ in 0..3 {
        group.run(&mut Op::Barrier).unwrap();
        let mut buffer = group.backend.allocate(DType::F32, COUNT).unwrap();
        buffer.as_mut_slice().unwrap().fill(rank as f32 + 1.0);
        let mut op = Op::AllReduce {
            buffer: buffer.lend(),
            op: ReduceOp::Sum.into(),
        };
        group.run(&mut op).unwrap();
        drop(op);
        let sums: &[f32] = buffer.as_slice().unwrap();
        assert!(sums.iter().all(|&sum| sum == 3.0));
        let mut plain = vec![1f32; COUNT];
        let mut op = Op::AllReduce {
            buffer: Buffer::from_mut(&mut plain),
            op: ReduceOp::Max.into(),
        };
        group.run(&mut op).unwrap();
    }
    // No rank may exit while another still reads.
    group.run(&mut Op::Barrier).unwrap();
}

/// Runs the ranks and returns what each wrote to standard error; `None` if a rank could not install a filter.
fn logs_of_ranks(refused: &str) -> Option<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            job::rank_command(folder.path(), rank)
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
    let log = |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();
    if let Some(log_of_refusal) = outputs.iter().map(log).find(|log| log.contains(NO_FILTER)) {
        eprintln!("skipped: no system call can be refused here: {log_of_refusal}");
        return None;
    }
    for (rank, output) in outputs.iter().enumerate() {
        let status = output.status;
        assert!(status.success(), "rank {rank}: {status}: {}", log(output));
    }
    Some(outputs.iter().map(log).collect())
}

#[test]
fn ranks_without_huge_pages_use_small_ones_and_log_it_once() {
    let Some(logs) = logs_of_ranks("huge pages") else {
        return;
    };
    for (rank, log) in logs.iter().enumerate() {
        let count = log.matches("huge pages were refused").count();
        assert_eq!(count, 1, "rank {rank}: {log}");
        assert!(!log.contains("ordinary memory"), "rank {rank}: {log}");
    }
}

#[test]
fn a_rank_that_may_make_no_shared_memory_allocates_ordinary_memory_and_logs_it_once() {
    let Some(logs) = logs_of_ranks("memory") else {
        return;
    };
    let counts: Vec<usize> = logs
        .iter()
        .map(|log| log.matches("allocated buffers are ordinary memory").count())
        .collect();
    assert_eq!(counts, [0, 1], "{logs:?}");
}

//! Ranks of PyTorch and of rcomm meet at one store, where a fault of either makes the other write its dump.
//!
//! The tests need `RCOMM_TEST_PYTHON`, a Python that has torch; without it, they print that they are skipped. In
//! PyTorch, a thread of the NCCL backend polls the flag. The scripts need no GPU, because they do what that thread
//! does, with PyTorch's own time-out, flag and flight recorder.
#![allow(clippy::unwrap_used)]

use rcomm::{Store, TcpStore, TcpStoreServer};
use rcomm_tests::fault::Fault;
use rcomm_tests::process::{CULPRIT, Job, wait_until};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const RANKS: u32 = 4;

/// A script of two ranks of PyTorch at the store with this port. The second never joins the all_reduce; the first times
/// out, and sets the flag.
const TIMES_OUT: &str = r#"
import datetime, os, struct, sys
if os.fork() == 0:
    rank = 1
else:
    rank = 0
import torch, torch.distributed as dist
def store():
    return dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, datetime.timedelta(seconds=60))
own = dist.PrefixStore("torch", store())
dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=2))
if rank == 1:
    sys.stdin.read()
    os._exit(0)
try:
    dist.all_reduce(torch.ones(4))
    os._exit(3)
except RuntimeError as error:
    assert "imed out" in str(error) or "imeout" in str(error), error
store().set("exception_dump", struct.pack("i", 17))
print("raised", flush=True)
os._exit(0)
"#;

/// A script of a rank of PyTorch that waits for the flag, makes a dump of its flight recorder, and prints the flag's
/// rank.
const LISTENS: &str = r#"
import datetime, os, struct, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, datetime.timedelta(seconds=120))
own = dist.PrefixStore("torch", store)
dist.init_process_group("gloo", store=own, rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
print("up", flush=True)
store.wait(["exception_dump"])
rank = struct.unpack("i", store.get("exception_dump"))[0]
dump = _dump_fr_trace()
assert isinstance(dump, bytes) and dump
print("rank", rank, flush=True)
"#;

/// Starts a script with the store's port; `None` if there is no Python with torch.
fn python(script: &str, port: u16) -> Option<Child> {
    let Ok(python) = std::env::var("RCOMM_TEST_PYTHON") else {
        // This is written to the stream itself, because the test harness captures the output of macros.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: RCOMM_TEST_PYTHON names no Python with torch"
        );
        return None;
    };
    let mut command = Command::new(python);
    command.args(["-c", script, &port.to_string()]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    Some(command.spawn().unwrap())
}

/// Starts a job of rcomm whose store outlives its ranks, as the store of an agent does.
fn start(port: u16, timeout_ms: &str) -> Job {
    let change = |_: u32, command: &mut Command| {
        command
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env("RCOMM_TIMEOUT_MS", timeout_ms);
    };
    let program = env!("CARGO_BIN_EXE_rank");
    Job::start(program, RANKS, Fault::StopJoining, change)
}

fn server() -> TcpStoreServer {
    TcpStoreServer::bind(&[[127, 0, 0, 1].into()], 0).unwrap()
}

#[test]
fn a_time_out_of_pytorch_makes_our_ranks_dump() {
    let server = server();
    let Some(mut torch) = python(TIMES_OUT, server.port()) else {
        return;
    };
    let job = start(server.port(), "600000");
    let dumps = wait_until("the dumps of all ranks", || {
        let dumps = job.dumps();
        (dumps.len() == RANKS as usize).then_some(dumps)
    });
    for (path, dump) in dumps {
        let reason = dump.identity.reason;
        assert_eq!(reason, "signal of rank 17", "{}", path.display());
    }
    let status = wait_until("the end of PyTorch's rank", || torch.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

#[test]
fn a_time_out_of_ours_makes_a_rank_of_pytorch_dump() {
    let server = server();
    let Some(torch) = python(LISTENS, server.port()) else {
        return;
    };
    let mut job = start(server.port(), "2000");
    for rank in (0..RANKS).filter(|&rank| rank != CULPRIT) {
        let ended = job.wait(rank);
        assert_eq!(ended.status.code(), Some(1), "rank {rank}: {ended:?}");
    }
    let store = TcpStore::connect("127.0.0.1", server.port(), Duration::from_secs(60)).unwrap();
    let flag = store
        .get("exception_dump", Duration::from_secs(60))
        .unwrap();
    let raised = i32::from_ne_bytes(flag.try_into().unwrap());
    let mut output = String::new();
    let mut torch = torch;
    torch
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut output)
        .unwrap();
    assert!(torch.wait().unwrap().success(), "{output}");
    assert!(output.contains(&format!("rank {raised}")), "{output}");
}

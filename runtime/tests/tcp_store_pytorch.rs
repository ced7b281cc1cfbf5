//! The stores of rcomm and of PyTorch together: each client with the other's server, and both libraries on one file.
//!
//! Needs `RCOMM_TEST_PYTHON`, a Python that has torch; without it, prints that it skips.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

use rcomm::ErrorKind;
use rcomm::store::{FileStore, PrefixStore, QueueStore, Store, TcpStore, TcpStoreServer};
use std::io::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

fn python(script: &str, arguments: &[&str]) -> Option<Child> {
    let Ok(python) = std::env::var("RCOMM_TEST_PYTHON") else {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: RCOMM_TEST_PYTHON names no Python with torch"
        );
        return None;
    };
    let mut command = Command::new(python);
    command.arg("-c").arg(script).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    Some(command.spawn().unwrap())
}

fn assert_success(mut child: Child) {
    let mut output = String::new();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_to_string(&mut output).unwrap();
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}: {output}");
}

const CLIENT: &str = r#"
import sys, threading, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, False, timedelta(seconds=60))
store.set("from_torch", b"\x00\xff text")
assert store.get("from_rust") == b"value"
assert store.add("count", 5) == 6
assert store.compare_set("cas", "", "first") == b"first"
assert store.compare_set("cas", "other", "second") == b"first"
store.append("log", "a"); store.append("log", "b")
assert store.get("log") == b"ab"
store.multi_set(["m1", "m2"], ["1", "2"])
assert store.multi_get(["m1", "m2"]) == [b"1", b"2"]
assert store.check(["m1", "m2"]) and not store.check(["m1", "never"])
assert store.delete_key("m1") and not store.delete_key("m1")
try:
    store.wait(["never"], timedelta(milliseconds=50))
    raise SystemExit("the wait ended")
except dist.DistStoreError as error:
    assert "never" in str(error), error
assert store.get("from_rust") == b"value", "the connection is not usable after a cancelled wait"
store.queue_push("queue", b"one"); store.queue_push("queue", b"two")
assert store.queue_len("queue") == 2
assert store.queue_pop("queue") == b"one"
assert sorted(store.list_keys())[:2] == ["cas", "count"], store.list_keys()
prefixed = dist.PrefixStore("dp", store)
assert prefixed.get("k") == b"under the prefix"
large = b"x" * (8 << 20)
store.set("large", large)
assert store.get("large") == large
other = store.clone()
waiter = threading.Thread(target=lambda: store.wait(["late"], timedelta(seconds=60)))
waiter.start()
other.set("late", "")
waiter.join()
store.barrier("meet", 2, timedelta(seconds=60))
"#;

#[test]
fn pytorchs_client_works_with_our_server() {
    let store = Arc::new(TcpStore::host("127.0.0.1", 0, LONG).unwrap());
    let Some(client) = python(CLIENT, &[&store.port().to_string()]) else {
        return;
    };
    assert_eq!(store.add("count", 1).unwrap(), 1);
    let dp = PrefixStore::new("dp", store.clone());
    dp.set("k", b"under the prefix").unwrap();
    store.set("from_rust", b"value").unwrap();
    assert_eq!(store.get("from_torch", LONG).unwrap(), b"\0\xff text");
    // The constructor of PyTorch's client counts itself as a worker, and so did that of `store`.
    store.wait_for_workers(2, LONG).unwrap();
    store.barrier("meet", 2, LONG).unwrap();
    assert_eq!(store.try_queue_pop("queue").unwrap().unwrap(), b"two");
    assert_eq!(store.get("large", LONG).unwrap().len(), 8 << 20);
    assert_success(client);
}

const SERVER: &str = r#"
import sys, torch.distributed as dist
from datetime import timedelta
libuv = sys.argv[1] == "libuv"
store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False, use_libuv=libuv)
print(store.port, flush=True)
store.wait(["from_rust"])
assert store.get("from_rust") == b"value"
store.set("from_torch", b"\x00\xff text")
sys.stdin.read()
"#;

fn check_our_client_with_pytorchs_server(kind: &str) {
    let Some(mut process) = python(SERVER, &[kind]) else {
        return;
    };
    let mut line = String::new();
    let mut stdout = BufReader::new(process.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    let store = TcpStore::connect("127.0.0.1", line.trim().parse().unwrap(), LONG).unwrap();
    // The key does not exist yet, so that the client must wait, which it does differently with the legacy server.
    let late = store
        .get("from_torch", SHORT)
        .expect_err("the key is not set yet");
    assert_eq!(late.kind(), ErrorKind::Timeout, "{late}");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store.get("from_torch", LONG).unwrap());
        store.set("from_rust", b"value").unwrap();
        assert_eq!(waiting.join().unwrap(), b"\0\xff text");
    });
    assert_eq!(store.get("from_rust", LONG).unwrap(), b"value");
    store.set("empty", b"").unwrap();
    assert_eq!(store.get("empty", LONG).unwrap(), b"");
    assert_eq!(store.add("n", -2).unwrap(), -2);
    assert_eq!(store.compare_set("c", b"", b"first").unwrap(), b"first");
    assert_eq!(store.compare_set("c", b"x", b"other").unwrap(), b"first");
    store.append("log", b"ab").unwrap();
    store.multi_set(&[("x", b"1"), ("y", b"2")]).unwrap();
    assert_eq!(
        store.multi_get(&["x", "log"], LONG).unwrap(),
        [b"1".to_vec(), b"ab".to_vec()]
    );
    let late = store
        .wait(&["x", "never"], SHORT)
        .expect_err("the key is never set");
    assert!(
        late.to_string().contains("\"never\" did not come"),
        "{late}"
    );
    assert!(store.check(&["x", "y"]).unwrap());
    assert!(store.delete("x").unwrap() && !store.delete("x").unwrap());
    if kind == "libuv" {
        assert!(store.list_keys().unwrap().contains(&"log".to_owned()));
        store.queue_push("q", b"v").unwrap();
        assert_eq!(store.queue_pop("q", LONG).unwrap(), b"v");
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| store.barrier("b", 4, LONG)))
                .collect();
            ranks
                .into_iter()
                .for_each(|rank| rank.join().unwrap().unwrap());
        });
    }
    drop(process.stdin.take());
    assert!(process.wait().unwrap().success());
}

#[test]
fn our_client_works_with_pytorchs_libuv_server() {
    check_our_client_with_pytorchs_server("libuv");
}

#[test]
fn our_client_works_with_pytorchs_legacy_server() {
    check_our_client_with_pytorchs_server("legacy");
}

const FILE: &str = r#"
import sys, torch.distributed as dist
store = dist.FileStore(sys.argv[1], 2)
store.set("from_torch", b"\x00\xff text")
assert store.get("from_rust") == b"value"
assert store.add("count", 5) in (5, 6)
store.set("gone", "x"); store.delete_key("gone")
store.set("done", "")
"#;

#[test]
fn file_stores_of_rcomm_and_pytorch_share_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::open(&path, Some(2)).unwrap();
    let Some(peer) = python(FILE, &[path.to_str().unwrap()]) else {
        return;
    };
    store.set("from_rust", b"value").unwrap();
    assert_eq!(store.get("from_torch", LONG).unwrap(), b"\0\xff text");
    store.add("count", 1).unwrap();
    store.wait(&["done"], LONG).unwrap();
    assert_eq!(store.get("count", LONG).unwrap(), b"6");
    assert!(!store.check(&["gone"]).unwrap());
    assert_success(peer);
    drop(store);
    assert!(
        !path.exists(),
        "the last of two users has not removed the file"
    );
}

#[test]
fn the_environment_that_torchrun_sets_is_read() {
    const PROGRAM: &str = r#"
import sys
from torch.distributed.run import main
sys.argv = ["torchrun", "--standalone", "--nproc-per-node=1", "--no-python", "env"]
main()
"#;
    let Some(child) = python(PROGRAM, &[]) else {
        return;
    };
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let rendezvous = rcomm::Rendezvous::from_environment(|name| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.map(str::to_owned)
    })
    .unwrap();
    assert_eq!((rendezvous.rank, rendezvous.world_size), (0, 1));
    assert_eq!(
        (rendezvous.local_rank, rendezvous.local_world_size),
        (Some(0), Some(1))
    );
    assert!(rendezvous.uses_agent_store);
    assert_ne!(rendezvous.master_port, 0);
    assert!(rendezvous.is_single_host());
}

#[test]
fn stopping_the_server_ends_a_wait_of_pytorchs_client() {
    const WAITER: &str = r#"
import sys, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 1, False, timedelta(seconds=60))
store.set("ready", "")
try:
    store.wait(["never"], timedelta(seconds=60))
except dist.DistNetworkError:
    sys.exit(0)
sys.exit("the wait ended in another way")
"#;
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let Some(child) = python(WAITER, &[&server.port().to_string()]) else {
        return;
    };
    let store = TcpStore::connect("127.0.0.1", server.port(), LONG).unwrap();
    store.wait(&["ready"], LONG).unwrap();
    drop(server);
    assert_success(child);
}

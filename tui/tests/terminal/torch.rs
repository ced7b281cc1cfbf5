//! A real PyTorch job with its debug server. Needs `RCOMM_TEST_PYTHON`, a Python that has torch with
//! `torch.distributed.debug`; without it, the test prints that it is skipped.

use crate::session::{Session, run};
use rcomm_tests::process::{Job, free_port};
use std::io::Write as _;
use std::process::Command;

/// Two ranks; rank 1 hangs after five sums.
const PROGRAM: &str = r#"
import time
import torch
import torch.distributed as dist
from torch.distributed import debug

def load_batch():
    time.sleep(600)

dist.init_process_group("gloo")
debug.start_debug_server()
numbers = torch.ones(4)
for step in range(5):
    dist.all_reduce(numbers)
if dist.get_rank() == 1:
    load_batch()
dist.all_reduce(numbers)
"#;

/// The Python of `RCOMM_TEST_PYTHON`; `None`, with the reason printed, if it lacks the module.
fn python() -> Option<String> {
    let python = std::env::var("RCOMM_TEST_PYTHON").ok();
    let usable = python.filter(|python| {
        let probe = Command::new(python)
            .args(["-c", "import torch.distributed.debug"])
            .output();
        probe.is_ok_and(|out| out.status.success())
    });
    if usable.is_none() {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: RCOMM_TEST_PYTHON names no Python with torch.distributed.debug"
        );
    }
    usable
}

#[test]
fn a_pytorch_job_is_attached_to_and_its_call_stacks_are_taken_live() {
    let Some(python) = python() else { return };
    let port = free_port().to_string();
    let job = Job::start_as(&python, 2, "-c", |_, command| {
        command
            .arg(PROGRAM)
            .env("MASTER_PORT", &port)
            .env("TORCH_FR_BUFFER_SIZE", "2000");
    });
    let store = format!("127.0.0.1:{port}");
    let arguments = ["--torch-store", &store, "--overdue", "1s"];
    let mut session = Session::start(&arguments, job.folder());
    session.wait_text("STUCK");
    session.wait_text("rank 1 never issued all_reduce #6");
    session.press("t");
    session.wait_text("taken live");
    session.wait_text("load_batch");
    session.press("q");
    session.end();
    let (status, out, err) = run(&["--torch-store", &store, "--once"], job.folder());
    assert!(out.contains("2 ranks"), "{status:?} {out}{err}");
}

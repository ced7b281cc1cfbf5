//! The command that shows more about a rank.

use super::Snapshot;
use super::source::Liveness;
use rcomm_recorder::model::Rank;
use rcomm_verdict::{Code, Verdict};

impl Snapshot {
    /// A shell command for the rank's host that shows more about the rank: it prints the stacks of the rank's process,
    /// where a late one spends its time, or the state and the parent of a stopped one; if the process has ended, the
    /// kernel's messages about killed processes. `None` if the process id is not known, or if the rank's call has
    /// returned with the error of a mismatch: then its process shows nothing of that.
    pub fn look_command(&self, rank: Rank) -> Option<String> {
        if self.report.verdict == Verdict::Mismatch && self.report.failure(rank).is_some() {
            return None;
        }
        let view = self.rank(rank)?;
        let dump = view.first_dump()?;
        let pid = dump.identity.pid;
        if pid == 0 {
            return None;
        }
        let accuses = |code: &Code| {
            let mut findings = self.report.findings.iter();
            findings.any(|finding| finding.code == *code && finding.culprit_ranks.contains(&rank))
        };
        let code = [Code::E151, Code::W220].into_iter().find(accuses);
        let mut files = dump.frames.iter().map(|frame| &frame.filename);
        let is_python = files.any(|name| name.ends_with(".py"));
        Some(match (code, is_python) {
            _ if view.liveness == Liveness::Dead => {
                "dmesg -T | grep -iE 'out of memory|killed process|xid'".to_owned()
            }
            // A debugger shows nothing of a stopped process but that it is stopped.
            (Some(Code::E151), _) => format!("ps -o pid,ppid,stat,wchan:24,tty,args -p {pid}"),
            (Some(Code::W220), true) => format!("py-spy record --duration 30 --pid {pid}"),
            (Some(Code::W220), false) => format!("perf record -g -p {pid} -- sleep 10"),
            (_, true) => format!("py-spy dump --pid {pid}"),
            (_, false) => format!("gdb -p {pid} -batch -ex 'thread apply all bt'"),
        })
    }
}

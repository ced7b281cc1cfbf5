//! The command that shows more about a rank.

use super::RankView;
use super::source::Liveness;

impl RankView {
    /// A shell command for the rank's host that shows more about the rank: it prints the stacks of the rank's process or,
    /// if that has ended, the kernel's messages about killed processes. `None` if the process id is not known.
    pub fn look_command(&self) -> Option<String> {
        let dump = self.first_dump()?;
        let pid = dump.identity.pid;
        if pid == 0 {
            return None;
        }
        let mut files = dump.frames.iter().map(|frame| &frame.filename);
        Some(match self.liveness {
            Liveness::Dead => "dmesg -T | grep -iE 'out of memory|killed process|xid'".to_owned(),
            _ if files.any(|name| name.ends_with(".py")) => format!("py-spy dump --pid {pid}"),
            _ => format!("gdb -p {pid} -batch -ex 'thread apply all bt'"),
        })
    }
}

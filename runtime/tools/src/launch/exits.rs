//! The end of a process, as text and as an exit code.

use super::LAUNCHER_FAILED;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Describes the end of a process, as the predicate of a sentence.
pub(super) fn describe_end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with {code}"),
        (None, Some(signal)) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            let core = if status.core_dumped() {
                ", core dumped"
            } else {
                ""
            };
            format!("was killed by {name} ({signal}{core})")
        }
        (None, None) => format!("ended ({status})"),
    }
}

/// The exit code of the launcher for a rank that ended with this status.
pub(super) fn code_of(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(LAUNCHER_FAILED)
}

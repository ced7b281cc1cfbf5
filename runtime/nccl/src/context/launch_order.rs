//! Makes NCCL launch the operations of all communicators of a device in their order on the host, if the options ask for
//! it.
//!
//! NCCL reads this setting only from the process's environment, when it is first used. So the variables are set when a
//! world is made, before the library is loaded, and only while the process has one thread: C code of another thread may
//! read the environment at any time.
//!
//! This order is not the default. With it, an operation starts only after all operations that were issued before it on
//! the device have started, also those of other groups, which wait for their own buffers. Without it, ranks may issue
//! operations of several groups in different orders as long as the device can hold the kernels. With it, such ranks may
//! wait for each other without end. In builds of NCCL for CUDA before 12.3, with drivers before 12.3, and in a capture
//! with drivers before 12.9, the operations even run one after the other (`getImplicitOrder`, enqueue.cc:1555 of NCCL
//! 2.30.7).

use super::options::{LaunchOrder, NcclOptions};
use crate::library::Version;
use rcomm_core::{Error, ErrorKind, Result};

/// The variable that orders launches.
const ORDER: &str = "NCCL_LAUNCH_ORDER_IMPLICIT";
/// The variable that must be 0: otherwise, NCCL fails a launch at the same time as that of another thread
/// (`ncclStrongStreamRelease`, strongstream.cc:336). rcomm launches from several threads: operations that waited for
/// the ranks to join, and calls that connect.
const RACE: &str = "NCCL_LAUNCH_RACE_FATAL";
/// The first release that orders launches.
const SINCE: Version = Version(22_600);
/// The first release that may order the launches of a single communicator (`launchOrderImplicit`). In the header of
/// 2.32.3, the structure that has the field is `ncclConfig_v23100`.
const BY_COMMUNICATOR: Version = Version(23_100);

/// Sets the variables that order launches, if the options ask for it and the variables are not set. To be called before
/// the process has a second thread.
///
/// # Errors
/// `InvalidArgument` if the environment has other values for these variables; `Unsupported` if the process has several
/// threads.
pub(crate) fn prepare(options: &NcclOptions) -> Result<()> {
    if options.launch_order == LaunchOrder::Library {
        return Ok(());
    }
    let missing = missing(|name| std::env::var(name).ok())?;
    if missing.is_empty() {
        return Ok(());
    }
    if !is_single_threaded() {
        let message = format!(
            "launches cannot be ordered: the process already has several threads, and its environment cannot be changed \
             safely any more. Start it with {ORDER}=1 and {RACE}=0"
        );
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    for (name, value) in missing {
        // SAFETY: this is the only thread of the process, so no other thread reads the environment during the call.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(())
}

/// Returns the variables that are to be set, with their values.
///
/// # Errors
/// `InvalidArgument` if a variable is set to another value.
fn missing(look_up: impl Fn(&str) -> Option<String>) -> Result<Vec<(&'static str, &'static str)>> {
    let mut missing = Vec::new();
    for (name, value) in [(ORDER, "1"), (RACE, "0")] {
        match look_up(name).filter(|value| !value.trim().is_empty()) {
            None => missing.push((name, value)),
            Some(found) if is_zero(&found) == is_zero(value) => {}
            Some(found) => {
                let message = format!(
                    "launches cannot be ordered: {name} is {found:?} in the environment, and must be {value}"
                );
                return Err(Error::new(ErrorKind::InvalidArgument, message));
            }
        }
    }
    Ok(missing)
}

/// Whether NCCL reads 0 from this value. For a text that is no number NCCL takes a default, so the text does not count
/// as 0.
fn is_zero(value: &str) -> bool {
    value.trim().parse() == Ok(0)
}

fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// Returns whether this library orders launches, as a word for the log, and warns of a launch that would fail.
///
/// # Errors
/// `Unsupported` if the options ask for the order and the library does not know it; `InvalidArgument` if they ask for
/// it and the environment rules it out, or neither the environment nor the communicators' options switch it on.
pub(crate) fn check(options: &NcclOptions, version: Version) -> Result<&'static str> {
    let value_of = |name: &str| {
        let value = std::env::var(name).ok();
        value.filter(|value| !value.trim().is_empty())
    };
    // The variable overrides the field of communicators, which later releases have.
    let is_ordered = match value_of(ORDER) {
        Some(value) => !is_zero(&value),
        None => options.comm.launch_order_implicit == Some(true) && version >= BY_COMMUNICATOR,
    };
    if version < SINCE {
        if options.launch_order == LaunchOrder::Implicit {
            let message = format!(
                "launches are ordered by NCCL {SINCE} and later; this library is {version}"
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        return Ok("none");
    }
    if options.launch_order == LaunchOrder::Implicit && !is_ordered {
        let message = format!(
            "launches are not ordered: set {ORDER}=1 and {RACE}=0 before the process starts a thread"
        );
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    if is_ordered && !value_of(RACE).is_some_and(|value| is_zero(&value)) {
        tracing::warn!(
            "launches are ordered without {RACE}=0: NCCL fails a launch if another thread launches at the \
             same time, and rcomm launches from several threads"
        );
    }
    Ok(if is_ordered { "implicit" } else { "none" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_are_not_set_are_added_and_others_must_agree() {
        let missing = |order: Option<&str>, race: Option<&str>| {
            let found = [(ORDER, order), (RACE, race)];
            let look_up = |name: &str| {
                let value = found.iter().find(|(known, _)| *known == name);
                value.and_then(|(_, value)| value.map(str::to_owned))
            };
            missing(look_up).map_err(|error| error.to_string())
        };
        assert_eq!(missing(None, None), Ok(vec![(ORDER, "1"), (RACE, "0")]));
        assert_eq!(missing(Some(" "), Some("0")), Ok(vec![(ORDER, "1")]));
        assert_eq!(missing(Some("2"), Some("0")), Ok(Vec::new()));
        let refused = missing(Some("0"), None).unwrap_err();
        assert!(
            refused.contains("NCCL_LAUNCH_ORDER_IMPLICIT is \"0\""),
            "{refused}"
        );
        let refused = missing(Some("1"), Some("1")).unwrap_err();
        assert!(
            refused.contains("NCCL_LAUNCH_RACE_FATAL is \"1\""),
            "{refused}"
        );
    }

    #[test]
    fn the_error_for_a_process_with_several_threads_names_the_variables() {
        // The test harness runs each test on a thread of its own.
        assert!(!is_single_threaded());
        let options = NcclOptions {
            launch_order: LaunchOrder::Implicit,
            ..NcclOptions::default()
        };
        let refused = prepare(&options).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("NCCL_LAUNCH_ORDER_IMPLICIT=1"));
        let old = check(&options, Version(22_505)).unwrap_err();
        assert!(old.to_string().contains("NCCL 2.26.0 and later"), "{old}");
    }
}

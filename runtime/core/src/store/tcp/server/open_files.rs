//! The limit of open files of the process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard one; returns whether this has raised it.
pub(super) fn raise_descriptor_limit() -> bool {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return false;
    }
    tracing::info!(
        from = limit.current,
        to = limit.maximum,
        "the store server needs more open files"
    );
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).is_ok()
}

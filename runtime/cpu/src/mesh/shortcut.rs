//! Opens the file of the host's segment without the help of the rank that made it.
//!
//! The name of that rank's socket ends with its process id and the number of the file's descriptor. If the system lets
//! one process of a user open the files of another (`/proc/<process>/fd`), a neighbor needs no handshake. The segment
//! holds a proof that its maker knows the job's secret ([`Identity::prove_segment`]), since the name may come from an
//! open store. Otherwise the neighbor requests the file at the socket.

use super::fill_random;
use super::handshake::Identity;
use crate::transport::shm::Segment;
use rcomm_recorder::model::{Rank, text};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

/// A new name for a socket at which this process gives out `file`; other processes can find the socket only by its
/// name.
pub(super) fn socket_name(file: &OwnedFd) -> io::Result<String> {
    let mut random = [0; 16];
    fill_random(&mut random)?;
    let (process, descriptor) = (std::process::id(), file.as_raw_fd());
    let random = text::hex(&random);
    Ok(format!("rcomm-{random}-{process}-{descriptor}"))
}

/// Makes the segment in `file`, with the proof.
pub(super) fn create(file: OwnedFd, identity: &Identity) -> io::Result<Segment> {
    let mut nonce = [0; 32];
    fill_random(&mut nonce)?;
    let proof = identity.prove_segment(identity.rank, &nonce);
    let size = identity.world_size as usize;
    Segment::create(file, identity.rank, size, (nonce, proof))
}

/// Opens the segment of the rank `maker`, which listens at `socket`.
///
/// # Errors
/// If the name does not end with a process id and a descriptor, if the system does not let this process open the file,
/// or if the segment is not ready or is not one of this job.
pub(super) fn attach(maker: Rank, socket: &str, identity: &Identity) -> io::Result<Segment> {
    let mut words = socket.rsplit('-');
    let mut number = || words.next().and_then(|word| word.parse::<u32>().ok());
    let (Some(descriptor), Some(process)) = (number(), number()) else {
        return Err(io::Error::other(
            "the socket's name does not end with a process id and a descriptor",
        ));
    };
    // The owner of the entry is the user of the process, unless the process has dropped privileges.
    let owner = std::fs::metadata(format!("/proc/{process}"))?.uid();
    if owner != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("the process belongs to another user"));
    }
    let path = format!("/proc/{process}/fd/{descriptor}");
    // In another PID namespace the number may be that of another process. No other file is opened, since opening may
    // block or have side effects.
    let target = std::fs::read_link(&path)?;
    if !target.as_os_str().as_bytes().starts_with(b"/memfd:rcomm") {
        return Err(io::Error::other(
            "the descriptor in the socket's name is not that of shared memory",
        ));
    }
    // The descriptor may have changed since: opening it must not block, and must not make a terminal the controlling
    // one.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let is_proved =
        |nonce: &[u8; 32], proof: &[u8; 32]| identity.verifies_segment(maker, nonce, proof);
    let size = identity.world_size as usize;
    Segment::attach_proved(file, identity.rank, size, is_proved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_core::Secret;

    fn identity(rank: Rank, secret: &str) -> Identity {
        Identity::new(rank, 2, "job", &Secret::from_text(secret))
    }

    #[test]
    fn a_neighbor_opens_the_segment_if_its_maker_knows_the_secret() {
        let file = Segment::file_for_new().unwrap();
        let socket = socket_name(&file).unwrap();
        let neighbor = identity(1, "secret");
        // The maker has not made the segment yet.
        assert!(attach(0, &socket, &neighbor).is_err());
        let segment = create(file, &identity(0, "secret")).unwrap();
        // A rank with another secret, and one that expects another maker, cannot use it.
        assert!(attach(0, &socket, &identity(1, "other")).is_err());
        assert!(attach(1, &socket, &neighbor).is_err());
        assert!(!segment.has_entered(1));
        let attached = attach(0, &socket, &neighbor).unwrap();
        assert!(segment.has_entered(1) && attached.has_entered(0));
        // Names without a process, with a descriptor that is not a segment's, and with none.
        let process = std::process::id();
        for name in [
            "rcomm-00ff",
            "",
            "rcomm-00ff-1",
            &format!("rcomm-00ff-{process}-0"),
            &format!("-{process}-99999"),
        ] {
            assert!(attach(0, name, &neighbor).is_err(), "{name}");
        }
    }
}

//! Passes a file descriptor from one process to another, over a unix socket.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Sends `bytes` together with `file`.
pub(crate) fn send(stream: &UnixStream, bytes: &[u8], file: &OwnedFd) -> io::Result<()> {
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::Error::other("no space for a file descriptor"));
    }
    let bytes = [IoSlice::new(bytes)];
    rustix::net::sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives bytes, and the file that is sent with them, if one is.
///
/// # Errors
/// Those of the system, also if this process has no free descriptor for the file; `UnexpectedEof` if fewer than
/// `bytes.len()` bytes arrive at once.
pub(crate) fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let expected = bytes.len();
    let mut into = [IoSliceMut::new(bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(stream, &mut into, &mut ancillary, flags)?;
    if received.bytes != expected {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut file = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            file = files.last().or(file);
        }
    }
    if file.is_none() && received.flags.contains(ReturnFlags::CTRUNC) {
        // The system does not say why it has passed no file. If this process has no free descriptor, `dup` fails with
        // the error that says so.
        rustix::io::dup(stream)?;
        return Err(io::Error::other("the system did not pass the file"));
    }
    Ok(file)
}

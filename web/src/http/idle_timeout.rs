//! A stream that fails once its client has not accepted data for too long.
//!
//! Without the limit, a client that stops reading would hold its connection and the buffered data
//! indefinitely.

use crate::http::traffic::Traffic;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream whose writes fail once they have been blocked for the limit.
pub(crate) struct IdleTimeout<S> {
    stream: S,
    limit: Duration,
    /// Runs while a write, flush or shutdown is blocked.
    waiting: Option<Pin<Box<Sleep>>>,
    traffic: Arc<Traffic>,
}

impl<S> IdleTimeout<S> {
    pub(crate) fn new(stream: S, limit: Duration, traffic: Arc<Traffic>) -> Self {
        Self {
            stream,
            limit,
            waiting: None,
            traffic,
        }
    }

    /// Returns the result of a write, flush or shutdown, or an error if they have been blocked for too long.
    fn check<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.waiting = None;
            return polled;
        }
        let limit = self.limit;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(limit)));
        if waiting.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.waiting = None;
        self.traffic.count_slow_client();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for IdleTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for IdleTimeout<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.check(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.check(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.check(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.check(cx, polled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_is_served_and_one_that_does_not_is_dropped() {
        let traffic = Arc::<Traffic>::default();
        let (mut client, server) = tokio::io::duplex(64);
        let mut server = IdleTimeout::new(server, Duration::from_secs(5), traffic.clone());
        server.write_all(&[0; 64]).await.expect("the pipe is empty");
        let slow = tokio::spawn(async move {
            let mut received = [0; 128];
            tokio::time::sleep(Duration::from_secs(4)).await;
            client
                .read_exact(&mut received)
                .await
                .expect("the server sends 128 bytes");
            client
        });
        server
            .write_all(&[0; 64])
            .await
            .expect("the client reads in time");
        let _client = slow.await.expect("the client does not panic");
        let error = server
            .write_all(&[0; 128])
            .await
            .expect_err("the client has stopped reading");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let mut text = String::new();
        traffic.write(crate::metrics::Form::Text, None, &mut text);
        assert!(
            text.contains("rcomm_web_slow_clients_dropped_total 1"),
            "{text}"
        );
    }
}

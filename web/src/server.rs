//! The socket: bound before anything is promised, closed after the last answer.

use crate::access::Access;
use crate::board::Board;
use crate::routes::router;
use axum::Router;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// How long requests that are under way may take after the stop.
const GRACE: Duration = Duration::from_secs(1);

/// A server that is bound and not yet running.
pub struct Server {
    listener: TcpListener,
    router: Router,
    address: SocketAddr,
}

impl Server {
    /// Binds; port 0 takes any free one.
    ///
    /// # Errors
    /// What the system says (the port is taken, or not allowed).
    pub async fn bind(address: SocketAddr, board: Board, access: Access) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self {
            listener,
            router: router(board, access),
            address,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is ready, then lets requests that are under way end, for a second at most.
    ///
    /// # Errors
    /// If the socket breaks.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let (say, mut said) = watch::channel(false);
        let told = async move {
            stop.await;
            say.send_replace(true);
        };
        let serving = axum::serve(self.listener, self.router).with_graceful_shutdown(told);
        tokio::select! {
            served = serving => served,
            // Event streams have no end of their own: they are cut, not waited for.
            () = async {
                if said.wait_for(|stopping| *stopping).await.is_err() {
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(GRACE).await;
            } => Ok(()),
        }
    }
}

//! Serves the page from within a program, on a separate thread, until the returned [`Page`] is dropped.

use super::server::Server;
use crate::http::access::{Access, is_loopback};
use crate::state::jobs::Jobs;
use crate::state::store::SnapshotStore;
use rcomm_analyzer::source::{RingSource, Source};
use rcomm_analyzer::{LiveOptions, Pace, Watch};
use rcomm_recorder::record::default_directory;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// Options of an embedded page.
#[derive(Clone, Debug)]
pub struct Options {
    /// Loopback address to listen on; port 0 picks a free one.
    pub listen: SocketAddr,
    /// The job whose rings are read; by default the newest job of the folder, preferring one that is alive.
    pub job: Option<String>,
    /// Folder of the rings; by default the one to which this user's programs write without `RCOMM_RING_DIR`.
    pub ring_dir: Option<PathBuf>,
    /// Token that requests must carry; by default one is generated.
    pub token: Option<String>,
    /// How often the records are read.
    pub pace: Pace,
    /// How the records are analyzed.
    pub live: LiveOptions,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            job: None,
            ring_dir: None,
            token: None,
            pace: Pace::default(),
            live: LiveOptions::default(),
        }
    }
}

/// Why a page could not be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address is reachable from other machines.
    #[error("{0} can be reached from other machines; run rcomm-web instead, which supports TLS")]
    NotLoopback(SocketAddr),
    /// The system has no randomness for a token.
    #[error("failed to generate a token: {0}")]
    Token(getrandom::Error),
    /// A thread, the runtime or the socket could not be created.
    #[error("failed to serve on {address}: {source}")]
    Io {
        /// The address to listen on.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A served page. Stops and joins its threads when dropped.
pub struct Page {
    address: SocketAddr,
    token: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _watch: Watch,
}

impl Page {
    /// The address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The token that requests must carry.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The URL for a browser, token included.
    pub fn url(&self) -> String {
        format!("http://{}/?token={}", self.address, self.token)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panicked thread has already reported its panic.
            let _ = thread.join();
        }
    }
}

/// Serves the rings of this node until the returned [`Page`] is dropped.
///
/// # Blocking
///
/// Until the socket is bound.
///
/// # Errors
///
/// [`ServeError`]: the address is reachable from other machines or cannot be bound, no token can be generated, or a
/// thread or the runtime cannot be started.
pub fn serve(options: Options) -> Result<Page, ServeError> {
    let address = options.listen;
    if !is_loopback(&address) {
        return Err(ServeError::NotLoopback(address));
    }
    let failed = |source| ServeError::Io { address, source };
    let token = match options.token {
        Some(token) => token,
        None => Access::random_token().map_err(ServeError::Token)?,
    };
    let directory = options.ring_dir.unwrap_or_else(default_directory);
    let jobs = Jobs::new(directory.clone(), options.live.clone(), options.pace);
    let rings: Box<dyn Source> = Box::new(RingSource::new(directory, options.job));
    let (store, watch) =
        SnapshotStore::watch(vec![rings], options.live, options.pace).map_err(failed)?;
    let access = Access::with_token(token.clone());
    let (sender, bound) = mpsc::channel();
    let (stop, stopped) = oneshot::channel::<()>();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed)?;
    let thread = std::thread::Builder::new()
        .name("rcomm/web".into())
        .spawn(move || {
            runtime.block_on(async move {
                let server = match Server::bind(address, store, access).await {
                    Ok(server) => server.jobs(jobs),
                    Err(error) => {
                        // The caller waits for this result, so sending it does not fail.
                        let _ = sender.send(Err(error));
                        return;
                    }
                };
                let _ = sender.send(Ok(server.address()));
                let stopped = async move {
                    // Dropping the other end is the stop signal.
                    let _ = stopped.await;
                };
                // `run` fails if it cannot create a directory for uploads. The caller has returned by then; the page
                // no longer answers.
                let _ = server.run(stopped).await;
            });
        })
        .map_err(failed)?;
    let ended = || std::io::Error::other("the server's thread ended");
    let address = bound
        .recv()
        .unwrap_or_else(|_| Err(ended()))
        .map_err(failed)?;
    Ok(Page {
        address,
        token,
        stop: Some(stop),
        thread: Some(thread),
        _watch: watch,
    })
}

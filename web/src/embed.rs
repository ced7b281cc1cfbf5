//! The page as part of a program: on a thread of its own, until it is dropped.

use crate::access::{Access, is_loopback};
use crate::server::Server;
use crate::store::SnapshotStore;
use rcomm_analyzer::source::{RingSource, Source};
use rcomm_analyzer::{LiveOptions, Pace, Watch};
use rcomm_recorder::record::default_directory;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// What a program's own page shows, and to whom.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to listen: a loopback address; port 0 takes any free one.
    pub listen: SocketAddr,
    /// Only the rings of this job; otherwise the newest of the folder.
    pub job: Option<String>,
    /// Folder of the rings; otherwise the usual one of this user.
    pub ring_dir: Option<PathBuf>,
    /// What requests must bring; otherwise a token is made.
    pub token: Option<String>,
    /// How often records are looked at.
    pub pace: Pace,
    /// How they are judged.
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
    /// The address is not for this machine alone.
    #[error("{0} can be reached from other machines; run rcomm-web instead, which supports TLS")]
    NotLoopback(SocketAddr),
    /// The system has no randomness for a token.
    #[error("failed to generate a token: {0}")]
    Token(getrandom::Error),
    /// A thread or the socket could not be had.
    #[error("failed to serve on {address}: {source}")]
    Io {
        /// Where it should have listened.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A page that is served. Stops, and joins its threads, when dropped.
pub struct Page {
    address: SocketAddr,
    token: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _watch: Watch,
}

impl Page {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What requests must bring.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The address for a browser, token included.
    pub fn url(&self) -> String {
        format!("http://{}/?token={}", self.address, self.token)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on its own.
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
/// [`ServeError`]: an address that others can reach, one that is taken, no thread to be had.
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
    let rings: Box<dyn Source> = Box::new(RingSource::new(directory, options.job));
    let (store, watch) =
        SnapshotStore::watch(vec![rings], options.live, options.pace).map_err(failed)?;
    let access = Access::with_token(token.clone());
    let (say, bound) = mpsc::channel();
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
                    Ok(server) => server,
                    Err(error) => {
                        // The caller waits for this.
                        let _ = say.send(Err(error));
                        return;
                    }
                };
                let _ = say.send(Ok(server.address()));
                let stopped = async move {
                    // The other end says it by going away.
                    let _ = stopped.await;
                };
                // A socket that breaks has nobody to be told to: the page is gone.
                let _ = server.run(stopped).await;
            });
        })
        .map_err(failed)?;
    let ended = || std::io::Error::other("its thread ended");
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

//! The server's socket and connections.
//!
//! Limits the number of connections, the time to send the head of a request, and the time a client may leave an
//! answer unread. Speaks TLS if a certificate is configured.

use crate::api::app_state::AppState;
use crate::api::uploaded::Uploads;
use crate::http::access::Access;
use crate::http::idle_timeout::IdleTimeout;
use crate::http::limits::Limits;
use crate::http::traffic::{GaugeGuard, Traffic};
use crate::metrics::Exemplars;
use crate::otel::{Counts, Telemetry};
use crate::serve::routes::router;
use crate::state::jobs::Jobs;
use crate::state::store::SnapshotStore;
use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rcomm_recorder::publish::{Place, Places};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ServerConfig, crypto};

/// Time that requests in progress get after the stop signal.
const GRACE: Duration = Duration::from_secs(1);

/// Interval between two removals of jobs that clients no longer request.
const REMOVAL_INTERVAL: Duration = Duration::from_secs(20);

/// A certificate and its key.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
}

impl Tls {
    /// Loads PEM files: the chain, with the server's own certificate first, and its private key.
    ///
    /// # Errors
    /// If a file cannot be read or parsed, or the key does not match the certificate.
    pub fn from_files(certificates: &Path, key: &Path) -> io::Result<Self> {
        let unreadable = |path: &Path, error: &dyn std::fmt::Display| {
            io::Error::other(format!("{}: {error}", path.display()))
        };
        let chain = CertificateDer::pem_file_iter(certificates)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| unreadable(certificates, &error))?;
        if chain.is_empty() {
            return Err(unreadable(certificates, &"it holds no certificate in PEM"));
        }
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| match error {
            pem::Error::NoItemsFound => unreadable(key, &"it holds no private key in PEM"),
            error => unreadable(key, &error),
        })?;
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| {
                let builder = builder.with_no_client_auth();
                builder.with_single_cert(chain, secret)
            })
            .map_err(|error| unreadable(certificates, &error))?;
        Ok(Self {
            acceptor: TlsAcceptor::from(Arc::new(config)),
        })
    }
}

/// A server that is bound and not yet running.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    store: SnapshotStore,
    /// The jobs of the node; `None` if the server lists none.
    jobs: Option<Jobs>,
    access: Access,
    limits: Limits,
    exemplars: Exemplars,
    /// The exporter's counts; `None` if nothing is exported.
    exported: Option<Arc<Counts>>,
    /// `None` for plain HTTP.
    tls: Option<Tls>,
}

impl Server {
    /// Binds the socket; port 0 picks a free one.
    ///
    /// # Errors
    /// The system's error, for example because the port is in use, or not allowed.
    pub async fn bind(
        address: SocketAddr,
        store: SnapshotStore,
        access: Access,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self {
            listener,
            address,
            store,
            jobs: None,
            access,
            limits: Limits::default(),
            exemplars: Exemplars::default(),
            exported: None,
            tls: None,
        })
    }

    /// Sets the limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Also lists the jobs of a node, and shows a job other than the store's on request.
    #[must_use]
    pub fn jobs(mut self, jobs: Jobs) -> Self {
        self.jobs = Some(jobs);
        self
    }

    /// Adds the exporter's counts to the metrics and, if it exports traces, its trace ids as exemplars.
    #[must_use]
    pub fn telemetry(mut self, telemetry: &Telemetry) -> Self {
        if telemetry.exports_traces() {
            self.exemplars = Exemplars::OfTraces;
        }
        self.exported = Some(telemetry.counts());
        self
    }

    /// Serves TLS only.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// The address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` completes, then gives requests in progress one second to end.
    ///
    /// # Errors
    /// If no private directory for uploads can be created or locked.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let Self {
            listener,
            store,
            jobs,
            access,
            limits,
            exemplars,
            exported,
            tls,
            ..
        } = self;
        let traffic = Arc::<Traffic>::default();
        let uploads = Uploads::new(limits.upload)?;
        let shared = AppState::new(
            store,
            jobs.clone(),
            uploads,
            traffic.clone(),
            exemplars,
            exported,
        );
        let router = router(shared, access, limits);
        let places = Places::new(limits.connections, limits.strangers_per_host);
        let (stop_sender, stop_receiver) = watch::channel(false);
        let mut connections = JoinSet::new();
        let mut removals = tokio::time::interval(REMOVAL_INTERVAL);
        tokio::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                _ = removals.tick() => {
                    if let Some(jobs) = jobs.clone() {
                        // `forget_idle` may join threads, so its end is not awaited.
                        drop(tokio::task::spawn_blocking(move || jobs.forget_idle()));
                    }
                    continue;
                }
                Some(_) = connections.join_next() => continue,
                accepted = listener.accept() => accepted,
            };
            let Ok((stream, client)) = accepted else {
                // Most likely the process is out of file descriptors, until a connection ends.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let Some(place) = places.try_enter(Some(client.ip())) else {
                traffic.count_refused_connection();
                continue;
            };
            // Best effort: without TCP_NODELAY small answers are delayed.
            let _ = stream.set_nodelay(true);
            let stream = IdleTimeout::new(stream, limits.idle_timeout, traffic.clone());
            let (router, stop_receiver, tls) = (router.clone(), stop_receiver.clone(), tls.clone());
            let counted = GaugeGuard::connection(&traffic);
            let refusals = traffic.clone();
            connections.spawn(async move {
                let its_place = place.clone();
                let served = async {
                    match tls {
                        None => {
                            serve_connection(stream, router, its_place, limits, stop_receiver).await
                        }
                        Some(tls) => {
                            let handshake = tls.acceptor.accept(stream);
                            // A failed handshake has already sent a TLS alert.
                            if let Ok(Ok(stream)) =
                                tokio::time::timeout(limits.head, handshake).await
                            {
                                serve_connection(stream, router, its_place, limits, stop_receiver)
                                    .await;
                            }
                        }
                    }
                };
                tokio::select! {
                    () = served => {}
                    () = place.is_taken() => refusals.count_refused_connection(),
                }
                drop(counted);
            });
        }
        drop(listener);
        stop_sender.send_replace(true);
        let ended = async { while connections.join_next().await.is_some() {} };
        // Event streams do not end by themselves: drop them after the grace period.
        let _ = tokio::time::timeout(GRACE, ended).await;
        Ok(())
    }
}

/// Serves one connection until the client disconnects or the server stops.
async fn serve_connection<S>(
    stream: S,
    router: Router,
    place: Arc<Place>,
    limits: Limits,
    mut stop_receiver: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(place.clone());
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_headers(64)
        .max_buf_size(32 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let stopping = async { drop(stop_receiver.wait_for(|stopping| *stopping).await) };
    // A client that disconnects early ends only its own connection.
    tokio::select! {
        _ = &mut connection => {}
        () = stopping => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

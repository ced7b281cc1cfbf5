//! Makes the sources of a job that are reached over the network, from the options of a command line.

use super::address::HostPort;
use crate::live::source::{
    DumpRequests, EndpointDumps, EndpointSource, RasSource, Source, StackRequests, StoreDumps,
    StoreSource, WorkerAddress, WorkerServerDumps, WorkerServerSource, WorkerServerStacks,
};
use rcomm_recorder::publish::{EndpointAddress, EndpointToken, Secret};

/// Sources of a job that are reached over the network. Several can be combined.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "args", derive(clap::Args))]
#[cfg_attr(feature = "args", group(id = "network", multiple = true))]
pub struct NetworkSources {
    /// Endpoint of any rank, unix:PATH or tcp:ADDRESS:PORT; it lists the other ranks' endpoints
    #[cfg_attr(feature = "args", arg(long, value_name = "ADDRESS"))]
    pub endpoint: Vec<EndpointAddress>,
    /// The job's store, which lists the endpoints of all ranks; or, of a PyTorch job, their worker servers
    #[cfg_attr(feature = "args", arg(long, value_name = "HOST:PORT"))]
    pub store: Vec<HostPort>,
    /// The store of a PyTorch job whose ranks called start_debug_server(): MASTER_ADDR:MASTER_PORT
    #[cfg_attr(feature = "args", arg(long, value_name = "HOST:PORT"))]
    pub torch_store: Vec<HostPort>,
    /// PyTorch worker server, http://HOST:PORT or unix:PATH; without RANK= the rank is its position
    #[cfg_attr(feature = "args", arg(long, value_name = "[RANK=]ADDRESS"))]
    pub worker_server: Vec<WorkerAddress>,
    /// NCCL's RAS service; one process reports on the whole job [without an address: localhost:28028]
    #[cfg_attr(feature = "args", arg(
        long,
        value_name = "HOST:PORT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = super::RAS_ADDRESS
    ))]
    pub ras: Vec<HostPort>,
    /// The number of ranks of the job, if no source states it
    #[cfg_attr(feature = "args", arg(
        long,
        value_name = "RANKS",
        value_parser = clap::value_parser!(u32).range(1..=1 << 20)
    ))]
    pub world_size: Option<u32>,
}

impl NetworkSources {
    /// Whether no source is named.
    pub fn is_empty(&self) -> bool {
        self.endpoint.is_empty()
            && self.store.is_empty()
            && self.torch_store.is_empty()
            && self.worker_server.is_empty()
            && self.ras.is_empty()
    }

    /// The sources. Endpoints over TCP require a token: without `token`, the one of the secret in `RCOMM_JOB_SECRET` is
    /// used.
    pub fn sources(&self, token: Option<&EndpointToken>) -> Vec<Box<dyn Source>> {
        let token = token.cloned().or_else(token_of_job);
        let token = token.as_ref();
        let mut sources: Vec<Box<dyn Source>> = Vec::new();
        if let Some(source) = self.endpoints(token) {
            sources.push(Box::new(source));
        }
        for source in self.stores(token) {
            sources.push(Box::new(source));
        }
        for source in self.worker_servers() {
            sources.push(Box::new(source));
        }
        for address in &self.ras {
            sources.push(Box::new(RasSource::new(address.clone())));
        }
        sources
    }

    /// The ways to request dumps from the job's ranks, with the token as in [`sources`](Self::sources).
    pub fn dump_requests(&self, token: Option<&EndpointToken>) -> Vec<Box<dyn DumpRequests>> {
        let token = token.cloned().or_else(token_of_job);
        let token = token.as_ref();
        let mut requests: Vec<Box<dyn DumpRequests>> = Vec::new();
        if let Some(source) = self.endpoints(token) {
            requests.push(Box::new(EndpointDumps::new(source)));
        }
        for source in self.stores(token) {
            requests.push(Box::new(StoreDumps::new(source)));
        }
        for source in self.worker_servers() {
            requests.push(Box::new(WorkerServerDumps::new(source)));
        }
        requests
    }

    /// The ways to take the call stacks of the job's ranks.
    pub fn stack_requests(&self) -> Vec<Box<dyn StackRequests>> {
        let in_stores = self.store.iter().map(|store| self.workers_in(store));
        let servers = self.worker_servers().chain(in_stores);
        servers
            .map(|source| Box::new(WorkerServerStacks::new(source)) as Box<dyn StackRequests>)
            .collect()
    }

    fn endpoints(&self, token: Option<&EndpointToken>) -> Option<EndpointSource> {
        let source = || EndpointSource::new(self.endpoint.clone(), token.cloned());
        (!self.endpoint.is_empty()).then(source)
    }

    fn stores(&self, token: Option<&EndpointToken>) -> impl Iterator<Item = StoreSource> {
        let stores = self.store.iter();
        stores.map(move |store| StoreSource::new(store.clone(), token.cloned(), self.world_size))
    }

    fn worker_servers(&self) -> impl Iterator<Item = WorkerServerSource> {
        let of_stores = self.torch_store.iter().map(|store| self.workers_in(store));
        let of_addresses = || WorkerServerSource::at(self.worker_server.clone());
        of_stores.chain((!self.worker_server.is_empty()).then(of_addresses))
    }

    fn workers_in(&self, store: &HostPort) -> WorkerServerSource {
        WorkerServerSource::in_store(store.clone(), self.world_size)
    }
}

/// The endpoint token of the job whose secret is in `RCOMM_JOB_SECRET`; `None` if the variable is not set. The secret
/// in the user's file, which all of the user's jobs on one host share, is not used here: its token would open the
/// endpoints of all these jobs to a server that is none of their ranks.
fn token_of_job() -> Option<EndpointToken> {
    let secret = std::env::var("RCOMM_JOB_SECRET").ok()?;
    (!secret.is_empty()).then(|| Secret::from_text(&secret).endpoint_token())
}

//! A program traces itself with `tracing`. Its collectives become children of its own spans.
//!
//! The spans are sent as OTLP over HTTP to `OTEL_EXPORTER_OTLP_ENDPOINT`:
//!
//! ```text
//! OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 rcomm-run -n 2 target/release/traced
//! ```
#![allow(clippy::print_stdout)]

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use rcomm::{Config, ReduceOp, World};
use rcomm_web::ProgramSpans;
use tracing::info_span;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

fn main() -> anyhow::Result<()> {
    let world = World::init(Config::from_environment()?)?;

    // The usual set-up of OpenTelemetry.
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(Post(ureq::Agent::new_with_defaults()))
        .with_protocol(Protocol::HttpBinary)
        .build()?;
    let provider = SdkTracerProvider::builder()
        .with_resource(Resource::builder().with_service_name("trainer").build())
        .with_batch_exporter(exporter)
        .build();
    let tracer = provider.tracer("trainer");

    // The only addition: a second layer, which makes the collectives children of the spans that issue them.
    let (collectives, layer) = ProgramSpans::start(world.recorder().clone(), tracer.clone())?;
    tracing_subscriber::registry()
        .with(tracing_opentelemetry::layer().with_tracer(tracer))
        .with(layer)
        .init();

    let mut gradients = vec![1.0f32; 1024];
    for step in 0..3 {
        let _step = info_span!("train_step", step).entered();
        info_span!("backward").in_scope(|| {
            let (head, tail) = gradients.split_at_mut(512);
            world.group().all_reduce(tail, ReduceOp::Avg)?;
            world.group().all_reduce(head, ReduceOp::Avg)
        })?;
        world.group().barrier()?;
    }
    // This barrier is outside of all spans, so it gets no span.
    world.group().barrier()?;

    drop(collectives);
    provider.shutdown()?;
    println!("rank {}: 3 steps traced", world.rank());
    Ok(world.shutdown()?)
}

/// Sends requests with ureq; any other client that implements [`HttpClient`] works too.
#[derive(Debug)]
struct Post(ureq::Agent);

#[async_trait]
impl HttpClient for Post {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts, body.to_vec());
        let (parts, mut body) = self.0.run(request)?.into_parts();
        Ok(Response::from_parts(parts, body.read_to_vec()?.into()))
    }
}

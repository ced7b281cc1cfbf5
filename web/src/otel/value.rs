//! Converts values, attributes and resources into their OTLP forms.

use super::settings::Settings;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;

pub(super) fn text(value: impl Into<String>) -> Value {
    Value::StringValue(value.into())
}

pub(super) fn number(value: impl TryInto<i64>) -> Value {
    Value::IntValue(value.try_into().unwrap_or(i64::MAX))
}

pub(super) fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

pub(super) fn scope() -> Option<InstrumentationScope> {
    Some(InstrumentationScope {
        name: "rcomm-web".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    })
}

/// The job as an OTLP resource, with `more` as additional attributes.
pub(super) fn resource(job: &str, settings: &Settings, more: Vec<KeyValue>) -> Option<Resource> {
    let service = settings.service.as_deref().unwrap_or(job);
    let service = if service.is_empty() { "rcomm" } else { service };
    let mut attributes = vec![attribute("service.name", text(service))];
    let given = settings.resource.iter();
    attributes.extend(given.map(|(key, value)| attribute(key, text(value.as_str()))));
    attributes.extend(more);
    Some(Resource {
        attributes,
        ..Resource::default()
    })
}

/// A wall clock time, ns since the epoch, in its OTLP form; 0 if it is negative.
pub(super) fn unix(ns: i64) -> u64 {
    u64::try_from(ns).unwrap_or(0)
}

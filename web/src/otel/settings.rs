//! The standard `OTEL_*` variables that this exporter supports.
//!
//! Source: "Environment Variable Specification" and "OpenTelemetry Protocol Exporter" of the
//! OpenTelemetry specification. Nothing is exported unless an endpoint is set.

use std::collections::BTreeMap;
use std::time::Duration;

/// Destination of one signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) url: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) timeout: Duration,
}

/// Which signals are exported, where to, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    pub(crate) traces: Option<Destination>,
    pub(crate) metrics: Option<Destination>,
    pub(crate) logs: Option<Destination>,
    /// `OTEL_SERVICE_NAME`; the job's name is used if it is `None`.
    pub(crate) service: Option<String>,
    /// `OTEL_RESOURCE_ATTRIBUTES`: keys and values.
    pub(crate) resource: Vec<(String, String)>,
    /// Interval between two exports of metrics.
    pub(crate) interval: Duration,
    /// Share of the ordinary traces that is kept, 0 to 1. Traces of operations that failed, are stuck or were slow
    /// are kept in any case.
    pub(crate) ratio: f64,
}

/// A variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable} is {value:?}: expected {expected}")]
pub struct SettingsError {
    variable: String,
    value: String,
    expected: &'static str,
}

impl Settings {
    /// Reads the settings from the environment. Returns `None` if `OTEL_SDK_DISABLED` is true, or if every signal
    /// lacks an endpoint or has the exporter `none`.
    ///
    /// # Errors
    /// [`SettingsError`] names the first variable whose value is invalid.
    pub fn from_environment() -> Result<Option<Self>, SettingsError> {
        // A name that is not UTF-8 is none of ours. A value that is not UTF-8 is converted, then checked as any other.
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let value = value.to_string_lossy().into_owned();
            name.starts_with("OTEL_").then_some((name, value))
        });
        Self::from_variables(&variables.collect())
    }

    pub(crate) fn from_variables(
        variables: &BTreeMap<String, String>,
    ) -> Result<Option<Self>, SettingsError> {
        let get = |name: &str| {
            let value = variables.get(name).map(|value| value.trim());
            value.filter(|value| !value.is_empty())
        };
        if get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let destination = |signal: &str, exporter: &str| -> Result<_, SettingsError> {
            let upper = signal.to_ascii_uppercase();
            let exporter = format!("OTEL_{exporter}_EXPORTER");
            match get(&exporter) {
                None | Some("otlp") => {}
                Some("none") => return Ok(None),
                Some(other) => return Err(invalid(&exporter, other, "`otlp` or `none`")),
            }
            let specific = |suffix: &str| format!("OTEL_EXPORTER_OTLP_{upper}_{suffix}");
            let common = |suffix: &str| format!("OTEL_EXPORTER_OTLP_{suffix}");
            let either = |suffix: &str| {
                let (specific, common) = (specific(suffix), common(suffix));
                let found = get(&specific).map(|value| (specific.clone(), value.to_owned()));
                found.or_else(|| get(&common).map(|value| (common.clone(), value.to_owned())))
            };
            if let Some((name, value)) =
                either("PROTOCOL").filter(|(_, value)| value != "http/protobuf")
            {
                return Err(invalid(&name, &value, "`http/protobuf`"));
            }
            // The common endpoint is a base URL; an endpoint of one signal is used as it is.
            let (name, url) = match (get(&specific("ENDPOINT")), get(&common("ENDPOINT"))) {
                (Some(url), _) => (specific("ENDPOINT"), url.to_owned()),
                (None, Some(base)) => {
                    let base = base.trim_end_matches('/');
                    (common("ENDPOINT"), format!("{base}/v1/{signal}"))
                }
                (None, None) => return Ok(None),
            };
            if !url.starts_with("http://") && !url.starts_with("https://") {
                return Err(invalid(
                    &name,
                    &url,
                    "an address that begins with http:// or https://",
                ));
            }
            let headers = match either("HEADERS") {
                Some((name, value)) => pairs(&name, &value)?,
                None => Vec::new(),
            };
            let timeout = match either("TIMEOUT") {
                Some((name, value)) => milliseconds(&name, &value)?,
                None => Duration::from_secs(10),
            };
            Ok(Some(Destination {
                url,
                headers,
                timeout,
            }))
        };
        let settings = Self {
            traces: destination("traces", "TRACES")?,
            metrics: destination("metrics", "METRICS")?,
            logs: destination("logs", "LOGS")?,
            service: get("OTEL_SERVICE_NAME").map(str::to_owned),
            resource: match get("OTEL_RESOURCE_ATTRIBUTES") {
                Some(value) => pairs("OTEL_RESOURCE_ATTRIBUTES", value)?,
                None => Vec::new(),
            },
            interval: match get("OTEL_METRIC_EXPORT_INTERVAL") {
                Some(value) => milliseconds("OTEL_METRIC_EXPORT_INTERVAL", value)?,
                None => Duration::from_secs(60),
            },
            ratio: ratio(get("OTEL_TRACES_SAMPLER"), get("OTEL_TRACES_SAMPLER_ARG"))?,
        };
        let any =
            settings.traces.is_some() || settings.metrics.is_some() || settings.logs.is_some();
        Ok(any.then_some(settings))
    }
}

fn invalid(variable: &str, value: &str, expected: &'static str) -> SettingsError {
    SettingsError {
        variable: variable.to_owned(),
        value: value.to_owned(),
        expected,
    }
}

fn milliseconds(variable: &str, value: &str) -> Result<Duration, SettingsError> {
    let number = value.parse::<u64>().ok().filter(|number| *number > 0);
    let expected = "a whole number of milliseconds, at least 1";
    let number = number.ok_or_else(|| invalid(variable, value, expected))?;
    Ok(Duration::from_millis(number))
}

/// The share of traces that a sampler keeps, from the values of `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG`.
fn ratio(sampler: Option<&str>, arg: Option<&str>) -> Result<f64, SettingsError> {
    match sampler {
        None | Some("always_on" | "parentbased_always_on") => Ok(1.0),
        Some("always_off" | "parentbased_always_off") => Ok(0.0),
        Some("traceidratio" | "parentbased_traceidratio") => {
            let text = arg.unwrap_or("1");
            let ratio = text
                .parse()
                .ok()
                .filter(|ratio| (0.0..=1.0).contains(ratio));
            ratio.ok_or_else(|| invalid("OTEL_TRACES_SAMPLER_ARG", text, "a number from 0 to 1"))
        }
        Some(other) => Err(invalid(
            "OTEL_TRACES_SAMPLER",
            other,
            "always_on, always_off, traceidratio, or one of them after parentbased_",
        )),
    }
}

/// Parses `key=value,key=value`, percent-encoded as in W3C Baggage.
fn pairs(variable: &str, text: &str) -> Result<Vec<(String, String)>, SettingsError> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=')?;
            let key = key.trim();
            (!key.is_empty()).then(|| Some((key.to_owned(), decoded(value.trim())?)))?
        })
        .collect::<Option<_>>()
        .ok_or_else(|| invalid(variable, text, "key=value pairs separated by commas"))
}

/// The text without its percent-encoding; `None` if the encoding is invalid, or the result is not UTF-8.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
        } else {
            byte
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Settings>, SettingsError> {
        let owned = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Settings::from_variables(&variables.iter().map(owned).collect())
    }

    #[test]
    fn without_an_endpoint_nothing_is_exported() {
        assert_eq!(read(&[("OTEL_SERVICE_NAME", "x")]), Ok(None));
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");
        assert_eq!(read(&[endpoint, ("OTEL_SDK_DISABLED", "true")]), Ok(None));
        assert!(matches!(read(&[endpoint]), Ok(Some(_))));
    }

    #[test]
    fn a_variable_of_one_signal_overrides_the_common_one() {
        let settings = read(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/"),
            ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "https://logs/in"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b, x=y"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "250"),
            ("OTEL_METRICS_EXPORTER", "none"),
            ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
            ("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=p-0"),
        ]);
        let settings = settings.expect("valid values").expect("an endpoint is set");
        let traces = settings.traces.expect("traces are exported");
        assert_eq!(traces.url, "http://c:4318/v1/traces");
        assert_eq!(traces.timeout, Duration::from_millis(250));
        assert_eq!(traces.headers[0], ("api-key".into(), "a b".into()));
        assert_eq!(
            settings.logs.expect("logs are exported").url,
            "https://logs/in"
        );
        assert_eq!((settings.metrics, settings.ratio), (None, 0.25));
        assert_eq!(settings.resource, [("k8s.pod.name".into(), "p-0".into())]);
    }

    #[test]
    fn an_invalid_variable_is_named() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c");
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "no pair"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:4318"),
        ] {
            let error = read(&[endpoint, (name, value)]).expect_err(name);
            assert_eq!((&*error.variable, &*error.value), (name, value));
        }
    }
}

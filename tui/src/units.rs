//! Short forms of times, ages and sizes for narrow columns.

/// An age: `0.4s`, `102s`, `12m`, `3h`; `--` if unknown.
pub fn age(ms: Option<f64>) -> String {
    match ms.filter(|ms| ms.is_finite()) {
        None => "--".into(),
        Some(ms) => {
            let seconds = (ms / 1e3).max(0.0);
            match seconds {
                s if s < 9.95 => format!("{s:.1}s"),
                s if s < 600.0 => format!("{s:.0}s"),
                s if s < 36_000.0 => format!("{:.0}m", s / 60.0),
                s => format!("{:.0}h", s / 3600.0),
            }
        }
    }
}

/// An age as `HH:MM:SS`, rounded as sentences round it.
pub fn clock_age(ms: f64) -> String {
    let seconds = (ms.max(0.0) / 1e3).round() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}")
}

/// A short time in ms: `0.21`, `4.1`, `37`; `--` if unknown.
pub fn millis(ms: Option<f64>) -> String {
    match ms.filter(|ms| ms.is_finite()) {
        None => "--".into(),
        Some(ms) if ms < 0.995 => format!("{ms:.2}"),
        Some(ms) if ms < 9.95 => format!("{ms:.1}"),
        Some(ms) => format!("{ms:.0}"),
    }
}

/// A size: `512`, `64K`, `1.5M`.
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = "";
    for next in ["K", "M", "G", "T"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if value >= 10.0 || value.fract() < 0.05 {
        format!("{value:.0}{unit}")
    } else {
        format!("{value:.1}{unit}")
    }
}

/// The time of day, UTC, of a wall clock in ns since the epoch.
pub fn time_of_day(wall_ns: i64) -> String {
    let seconds = wall_ns.div_euclid(1_000_000_000).rem_euclid(86_400);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_grow_coarser() {
        let ages = [400.0, 9_960.0, 102_400.0, 720_000.0, 36_000_000.0];
        let shown: Vec<_> = ages.map(|ms| age(Some(ms))).into();
        assert_eq!(shown, ["0.4s", "10s", "102s", "12m", "10h"]);
        assert_eq!(age(None), "--");
        assert_eq!(age(Some(-5.0)), "0.0s");
        assert_eq!(clock_age(102_000.0), "00:01:42");
    }

    #[test]
    fn sizes_and_times_are_short() {
        assert_eq!(bytes(512), "512");
        assert_eq!(bytes(64 << 10), "64K");
        assert_eq!(bytes(3 << 19), "1.5M");
        assert_eq!(millis(Some(0.214)), "0.21");
        assert_eq!(time_of_day(1_700_000_000_000_000_000), "22:13:20");
    }
}

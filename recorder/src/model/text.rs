//! Times, sizes and ranks as text for people, for every program.
//!
//! | form | where | examples |
//! |---|---|---|
//! | [`duration`] | errors and logs of the runtime | `42 µs`, `350 ms`, `600.0 s` |
//! | [`format_time`] | sentences of findings | `20 ms`, `1.5 s`, `102 s`, `6 min 28 s` |
//! | [`duration_ms`], [`age`] | tables, reports and views | `4.2 s`, `2 min 5 s`, `1 h 30 min` |
//! | [`millis`] | columns whose head has the unit | `0.21` |
//! | [`bytes`] | sentences, tables and reports | `512 B`, `1.5 GiB` |
//! | [`narrow_bytes`] | narrow columns | `512`, `1.5G` |
//! | [`time_of_day`] | clocks | `14:03:26` |
//! | [`ranks`] | errors of the runtime | `rank 3`, `ranks 1, 2 and 5 more` |
//! | [`hex`] | identifiers and digests | `00ff` |

use super::Rank;
use std::time::Duration;

/// The error about an option's value that is not a duration with its unit: it says what to write.
pub const NO_DURATION: &str = "not a duration: write 500ms, 5s, 2m or 1h";

/// A duration as messages give it: `2.0 s`, `350 ms`, `42 µs`.
pub fn duration(duration: Duration) -> String {
    let rounded = |unit: u128| (duration.as_nanos() + unit / 2) / unit;
    match (rounded(1_000), rounded(1_000_000)) {
        (us, _) if us < 1_000 => format!("{us} µs"),
        (_, ms) if ms < 1_000 => format!("{ms} ms"),
        _ => format!("{:.1} s", duration.as_secs_f64()),
    }
}

/// Milliseconds for people: `3.0 ms`, `4.2 s`, `2 min 5 s`, `1 h 30 min`.
pub fn duration_ms(ms: f64) -> String {
    // Negative ages come from clocks that disagree; they are shown as such.
    let (sign, ms) = if ms < 0.0 { ("-", -ms) } else { ("", ms) };
    let seconds = ms / 1e3;
    // The bounds are those from which a number would be rounded to one that has the next form.
    let text = if ms < 9.95 {
        format!("{ms:.1} ms")
    } else if ms < 999.5 {
        format!("{ms:.0} ms")
    } else if seconds < 9.95 {
        format!("{seconds:.1} s")
    } else if seconds < 119.5 {
        format!("{seconds:.0} s")
    } else {
        let rounded = seconds.round() as u64;
        match (rounded / 3600, rounded / 60 % 60, rounded % 60) {
            (0, minutes, 0) => format!("{minutes} min"),
            (0, minutes, rest) => format!("{minutes} min {rest} s"),
            (hours, 0, _) => format!("{hours} h"),
            (hours, minutes, _) => format!("{hours} h {minutes} min"),
        }
    };
    format!("{sign}{text}")
}

/// Milliseconds as the sentences of findings give them: `20 ms`, `1.5 s`, `102 s`; from two minutes on as
/// [`duration_ms`].
pub fn format_time(ms: f64) -> String {
    if ms >= 119_500.0 {
        duration_ms(ms)
    } else if ms >= 9_950.0 {
        format!("{:.0} s", ms / 1000.0)
    } else if ms >= 999.5 {
        format!("{:.1} s", ms / 1000.0)
    } else {
        format!("{ms:.0} ms")
    }
}

/// An age in ms, as [`duration_ms`]; `--` if unknown. A negative age, which comes from a clock that was set back, is
/// shown as 0.
pub fn age(ms: Option<f64>) -> String {
    let known = ms.filter(|ms| ms.is_finite());
    known.map_or_else(|| "--".into(), |ms| duration_ms(ms.max(0.0)))
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

/// The time of day, UTC, of a wall clock in ns since the epoch.
pub fn time_of_day(wall_ns: i64) -> String {
    let seconds = wall_ns.div_euclid(1_000_000_000).rem_euclid(86_400);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}")
}

/// Bytes for people: `512 B`, `64 KiB`, `1.5 GiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let text = format!("{value:.1}");
    format!(
        "{} {}",
        text.strip_suffix(".0").unwrap_or(&text),
        UNITS[unit]
    )
}

/// A size in bytes for a narrow column: `512`, `64K`, `1.5M`.
pub fn narrow_bytes(count: u64) -> String {
    let mut value = count as f64;
    let mut unit = "";
    for next in ["K", "M", "G", "T"] {
        // From half below 1024 on, a number without decimals is rounded to one that has the next unit.
        if value < 1023.5 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if value >= 9.95 || value.fract() < 0.05 || value.fract() >= 0.95 {
        format!("{value:.0}{unit}")
    } else {
        format!("{value:.1}{unit}")
    }
}

/// Ranks as errors name them: `rank 3`, `ranks 1, 2`, or the first `limit` of them and how many more.
pub fn ranks(ranks: &[Rank], limit: usize) -> String {
    let shown: Vec<String> = ranks.iter().take(limit).map(Rank::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    match ranks.len() - shown.len() {
        0 => format!("{noun} {}", shown.join(", ")),
        more => format!("{noun} {} and {more} more", shown.join(", ")),
    }
}

/// Bytes as hexadecimal digits in lower case: `00ff`.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_ranks_says_how_many_it_leaves_out() {
        assert_eq!(ranks(&[3], 8), "rank 3");
        assert_eq!(ranks(&[1, 2], 2), "ranks 1, 2");
        assert_eq!(ranks(&[1, 2, 5, 6], 2), "ranks 1, 2 and 2 more");
    }

    #[test]
    fn durations_are_rounded_to_their_unit() {
        let cases = [
            (1_999_999_289, "2.0 s"),
            (600_000_000_000, "600.0 s"),
            (999_999_999, "1.0 s"),
            (350_400_000, "350 ms"),
            (999_900, "1 ms"),
            (42_100, "42 µs"),
        ];
        for (ns, text) in cases {
            assert_eq!(duration(Duration::from_nanos(ns)), text);
        }
    }

    #[test]
    fn the_unit_of_a_duration_in_ms_grows_with_it() {
        for (ms, text) in [
            (0.25, "0.2 ms"),
            (9.94, "9.9 ms"),
            (9.96, "10 ms"),
            (640.0, "640 ms"),
            (999.4, "999 ms"),
            (999.6, "1.0 s"),
            (9_949.0, "9.9 s"),
            (9_960.0, "10 s"),
            (3_599_600.0, "1 h"),
            (4_200.0, "4.2 s"),
            (102_000.0, "102 s"),
            (125_000.0, "2 min 5 s"),
            (5_400_000.0, "1 h 30 min"),
            (-3.0, "-3.0 ms"),
        ] {
            assert_eq!(duration_ms(ms), text);
        }
    }

    #[test]
    fn sentences_have_no_more_than_two_units() {
        let times = [
            20.0, 999.6, 1_540.0, 9_960.0, 102_400.0, 119_499.0, 119_500.0, 388_000.0,
        ];
        let shown: Vec<_> = times.map(format_time).into();
        let expected = [
            "20 ms",
            "1.0 s",
            "1.5 s",
            "10 s",
            "102 s",
            "119 s",
            "2 min",
            "6 min 28 s",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn ages_short_times_and_times_of_day_have_their_forms() {
        let ages = [400.0, 9_960.0, 102_400.0, 164_000.0, 720_000.0, 5_400_000.0];
        let shown: Vec<_> = ages.map(|ms| age(Some(ms))).into();
        assert_eq!(
            shown,
            [
                "400 ms",
                "10 s",
                "102 s",
                "2 min 44 s",
                "12 min",
                "1 h 30 min"
            ]
        );
        assert_eq!(age(None), "--");
        assert_eq!(age(Some(-5.0)), "0.0 ms");
        assert_eq!(millis(Some(0.214)), "0.21");
        assert_eq!(time_of_day(1_700_000_000_000_000_000), "22:13:20");
    }

    #[test]
    fn sizes_have_the_largest_unit_that_fits() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(65_536), "64 KiB");
        assert_eq!(bytes(1_610_612_736), "1.5 GiB");
        assert_eq!(bytes(1_048_575), "1 MiB");
        assert_eq!(bytes((1 << 30) - 1), "1 GiB");
    }

    #[test]
    fn narrow_sizes_have_at_most_one_letter() {
        assert_eq!(narrow_bytes(512), "512");
        assert_eq!(narrow_bytes(64 << 10), "64K");
        assert_eq!(narrow_bytes(3 << 19), "1.5M");
        assert_eq!(narrow_bytes(1_023), "1023");
        assert_eq!(narrow_bytes(1_048_575), "1M");
        assert_eq!(narrow_bytes(10_230), "10K");
    }

    #[test]
    fn each_byte_becomes_two_hexadecimal_digits() {
        assert_eq!(hex(&[0, 255]), "00ff");
    }
}

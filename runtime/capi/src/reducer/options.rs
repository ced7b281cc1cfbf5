//! The options of a reducer, as C gives them.

use crate::status::refused;
use rcomm::Result;
use rcomm::data_parallel::{
    BatchedPowerSgdHook, BucketSizes, CommHook, Delayed, Gradient, Int8CompressHook, Parameter,
    PostLocalSgdHook, PowerSgdHook, ReducerOptions, UnevenInputs, UnusedParameters, Wire,
};
use serde_json::{Map, Value};

/// The communication hook that averages buckets; `None` if the reducer does so itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Hook {
    #[default]
    None,
    Int8,
    PowerSgd {
        rank: usize,
        start: u64,
    },
    BatchedPowerSgd {
        rank: usize,
        start: u64,
    },
    PostLocalSgd {
        /// The size of a local group.
        ranks: u32,
        start: u64,
    },
}

/// The options of a reducer of any element type.
#[derive(Clone, Debug)]
pub(crate) struct GivenOptions {
    buckets: BucketSizes,
    rebuild_buckets: bool,
    pub(crate) unused: UnusedParameters,
    static_graph: bool,
    uneven: UnevenInputs,
    sparse: Vec<usize>,
    delayed: Delayed,
    wire: Wire,
    hook: Hook,
    shapes: Option<Vec<Vec<u64>>>,
}

impl Default for GivenOptions {
    fn default() -> Self {
        Self {
            buckets: BucketSizes::default(),
            rebuild_buckets: true,
            unused: UnusedParameters::default(),
            static_graph: false,
            uneven: UnevenInputs::default(),
            sparse: Vec::new(),
            delayed: Delayed::default(),
            wire: Wire::default(),
            hook: Hook::default(),
            shapes: None,
        }
    }
}

/// Returns the value that was taken from an option; if none was, an error that says what the option may be.
fn take<T>(key: &str, value: &Value, expected: &str, taken: Option<T>) -> Result<T> {
    taken.ok_or_else(|| {
        refused(format!(
            "the option {key:?} is {value}: it must be {expected}"
        ))
    })
}

fn size(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

fn list<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    value.as_array()?.iter().map(read).collect()
}

/// The value that `names` has for the text `value`; `None` if it has none, or `value` is no text.
fn named<T: Copy>(value: &Value, names: &[(&str, T)]) -> Option<T> {
    let name = value.as_str()?;
    let found = names.iter().find(|(known, _)| *known == name);
    found.map(|&(_, value)| value)
}

/// The hook that the option `hook` describes; `None` if it is not of the form that `rcomm_reducer_new_with` documents.
fn hook(value: &Value) -> Option<Hook> {
    if value.as_str() == Some("int8") {
        return Some(Hook::Int8);
    }
    let object = value.as_object().filter(|object| object.len() == 1)?;
    let (name, options) = object.iter().next()?;
    let options = options.as_object()?;
    let has_only = |own_key: &str| options.keys().all(|key| key == own_key || key == "start");
    let start = |options: &Map<String, Value>| options.get("start").map_or(Some(0), Value::as_u64);
    match name.as_str() {
        "power_sgd" if has_only("rank") => Some(Hook::PowerSgd {
            rank: size(options.get("rank")?)?,
            start: start(options)?,
        }),
        "batched_power_sgd" if has_only("rank") => Some(Hook::BatchedPowerSgd {
            rank: size(options.get("rank")?)?,
            start: start(options)?,
        }),
        "post_local_sgd" if has_only("ranks") => Some(Hook::PostLocalSgd {
            ranks: u32::try_from(options.get("ranks")?.as_u64()?).ok()?,
            start: start(options)?,
        }),
        _ => None,
    }
}

impl GivenOptions {
    /// Sets the sizes of buckets in bytes; 0 = the default.
    pub(crate) fn set_sizes(&mut self, first: usize, rest: usize) {
        for (size, given) in [
            (&mut self.buckets.first, first),
            (&mut self.buckets.rest, rest),
        ] {
            if given > 0 {
                *size = given;
            }
        }
    }

    /// Reads a JSON object.
    ///
    /// # Errors
    /// `InvalidArgument` names the key that is unknown, or the value and what it may be.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| refused(format!("the options are not JSON: {error}")))?;
        let Some(object) = value.as_object() else {
            return Err(refused(format!("the options are {value}, not an object")));
        };
        let mut given = Self::default();
        for (key, value) in object {
            let bytes = || {
                let size = size(value).filter(|&size| size > 0);
                take(key, value, "a whole number of bytes, at least 1", size)
            };
            let flag = || take(key, value, "true or false", value.as_bool());
            match key.as_str() {
                "first_bytes" => given.buckets.first = bytes()?,
                "bucket_bytes" => given.buckets.rest = bytes()?,
                "static_graph" => given.static_graph = flag()?,
                "rebuild_buckets" => given.rebuild_buckets = flag()?,
                "unused" => {
                    let names = [
                        ("find", UnusedParameters::Find),
                        ("refuse", UnusedParameters::Refuse),
                    ];
                    let found = named(value, &names);
                    given.unused = take(key, value, r#""find" or "refuse""#, found)?;
                }
                "uneven" => {
                    let names = [
                        ("no", UnevenInputs::No),
                        ("divide_by_size", UnevenInputs::DivideBySize),
                        ("divide_by_active", UnevenInputs::DivideByActive),
                    ];
                    let expected = r#""no", "divide_by_size" or "divide_by_active""#;
                    given.uneven = take(key, value, expected, named(value, &names))?;
                }
                "wire" => {
                    let names = [("own", Wire::Own), ("f16", Wire::F16), ("bf16", Wire::Bf16)];
                    let found = named(value, &names);
                    given.wire = take(key, value, r#""own", "f16" or "bf16""#, found)?;
                }
                "hook" => {
                    let expected =
                        r#""int8", or an object such as {"power_sgd": {"rank": 2, "start": 10}}"#;
                    given.hook = take(key, value, expected, hook(value))?;
                }
                "sparse" => {
                    let expected = "a list of positions of parameters";
                    given.sparse = take(key, value, expected, list(value, size))?;
                }
                "delayed" => {
                    let expected = "a list of positions of parameters";
                    given.delayed.parameters = take(key, value, expected, list(value, size))?;
                }
                "delayed_until" => {
                    let until = take(key, value, "the position of a parameter", size(value))?;
                    given.delayed.until = Some(until);
                }
                "shapes" => {
                    let shapes = list(value, |shape| list(shape, Value::as_u64));
                    let expected = "a list of a shape for each parameter, such as [[2, 3], [4]]";
                    given.shapes = Some(take(key, value, expected, shapes)?);
                }
                _ => return Err(refused(format!("a reducer has no option {key:?}"))),
            }
        }
        Ok(given)
    }

    /// The parameters of these names and numbers of elements, in the shapes that were given.
    ///
    /// # Errors
    /// `InvalidArgument` if there is not one shape for each parameter, or a shape has another number of elements.
    pub(crate) fn parameters(&self, named: &[(&str, u64)]) -> Result<Vec<Parameter>> {
        let Some(shapes) = &self.shapes else {
            let parameters = named
                .iter()
                .map(|&(name, len)| Parameter::new(name, &[len]));
            return Ok(parameters.collect());
        };
        if shapes.len() != named.len() {
            return Err(refused(format!(
                "there are {} shapes for {} parameters",
                shapes.len(),
                named.len()
            )));
        }
        let parameters = named.iter().zip(shapes).map(|(&(name, len), shape)| {
            let elements = shape
                .iter()
                .try_fold(1u64, |product, &size| product.checked_mul(size));
            match elements == Some(len) {
                true => Ok(Parameter::new(name, shape)),
                false => Err(refused(format!(
                    "the shape {shape:?} of the parameter {name:?} does not have its {len} elements"
                ))),
            }
        });
        parameters.collect()
    }

    /// The options of a reducer of this element type for these parameters.
    ///
    /// # Errors
    /// Those of the hook.
    pub(crate) fn options<T: Gradient>(
        self,
        parameters: &[Parameter],
    ) -> Result<ReducerOptions<T>> {
        let hook: Option<Box<dyn CommHook<T>>> = match self.hook {
            Hook::None => None,
            Hook::Int8 => Some(Box::new(Int8CompressHook::default())),
            Hook::PowerSgd { rank, start } => {
                Some(Box::new(PowerSgdHook::new(rank, start, parameters)?))
            }
            Hook::BatchedPowerSgd { rank, start } => {
                Some(Box::new(BatchedPowerSgdHook::new(rank, start)?))
            }
            Hook::PostLocalSgd { ranks, start } => {
                Some(Box::new(PostLocalSgdHook::adjacent(ranks, start)))
            }
        };
        Ok(ReducerOptions {
            buckets: self.buckets,
            rebuild_buckets: self.rebuild_buckets,
            unused: self.unused,
            static_graph: self.static_graph,
            uneven: self.uneven,
            sparse: self.sparse,
            delayed: self.delayed,
            wire: self.wire,
            hook,
        })
    }
}

//! Options of individual backends, which the configuration carries without knowing their types.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Options of individual backends, each found by its type.
///
/// ```
/// use rcomm::config::BackendOptions;
///
/// #[derive(Debug, PartialEq)]
/// struct MyOptions {
///     streams: u32,
/// }
///
/// let mut options = BackendOptions::default();
/// options.set(MyOptions { streams: 2 });
/// assert_eq!(options.get(), Some(&MyOptions { streams: 2 }));
/// ```
#[derive(Clone, Debug, Default)]
pub struct BackendOptions(Vec<Arc<dyn Options>>);

trait Options: Any + fmt::Debug + Send + Sync {}

impl<T: Any + fmt::Debug + Send + Sync> Options for T {}

impl BackendOptions {
    /// Adds these options, or replaces those of the same type.
    pub fn set<T: Any + fmt::Debug + Send + Sync>(&mut self, options: T) {
        self.0.retain(|held| !(&**held as &dyn Any).is::<T>());
        self.0.push(Arc::new(options));
    }

    /// The options of this type; `None` if there are none.
    pub fn get<T: Any>(&self) -> Option<&T> {
        let mut held = self.0.iter();
        held.find_map(|options| (&**options as &dyn Any).downcast_ref())
    }
}

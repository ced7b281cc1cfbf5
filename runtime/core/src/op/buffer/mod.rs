//! Typed memory that an operation reads or fills: borrowed, owned or foreign, on the host or a device.
//!
//! The typed interface turns slices and vectors into a [`Buffer`], and a backend sees only that. A buffer's
//! lifetime is that of the borrow (the *loan*): a blocking call passes `Buffer<'_>` over the caller's slices,
//! and the borrow checker ensures that no backend keeps one; an asynchronous operation needs
//! `Buffer<'static>`, which owns its memory or keeps the owner alive. A buffer over existing memory is made without
//! an allocation.

mod device;
#[cfg(test)]
mod tests;

pub use device::{Device, DeviceKind};

use crate::op::element::Element;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::DType;
use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

/// How a buffer holds its memory. A *loan* is a borrow of the caller's memory.
enum Memory {
    /// A caller's `&[T]`.
    Read,
    /// A caller's `&mut [T]`.
    Lent,
    /// The parts of a `Vec`; `free` reassembles the vector and drops it.
    Owned {
        capacity: usize,
        free: unsafe fn(NonNull<u8>, usize),
    },
    /// Foreign memory, alive as long as `owner` is.
    Kept {
        owner: Arc<dyn Any + Send + Sync>,
        access: Access,
    },
}

/// The permitted accesses to foreign memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It may only be read.
    Read,
    /// It may be read and written.
    Write,
}

/// Contiguous elements of one type.
///
/// # Thread safety
/// `Send`: an operation moves to a backend's thread with its buffers. `Sync`: a shared reference gives only
/// read access.
pub struct Buffer<'a> {
    data: NonNull<u8>,
    len: u64,
    shape: Option<Box<[u64]>>,
    dtype: DType,
    device: Device,
    memory: Memory,
    loan: PhantomData<&'a mut [u8]>,
}

// SAFETY: only the buffer has access to its memory while it lives (a `&mut` loan, an owned vector), or shares it
// read-only (`&[T]` of `T: Sync`); elements are plain numbers without thread affinity, `free` only returns memory
// to the global allocator, and the owner of foreign memory is `Send + Sync`.
unsafe impl Send for Buffer<'_> {}
// SAFETY: through `&Buffer` the memory can only be read (`as_bytes`, `as_slice`), by any number of threads
// at once; `owner` gives `&Arc` of something that is `Send + Sync`.
unsafe impl Sync for Buffer<'_> {}

impl<'a> Buffer<'a> {
    /// A buffer over the caller's memory, for reading.
    #[inline]
    pub fn from_slice<T: Element>(slice: &'a [T]) -> Self {
        Self {
            data: NonNull::from(slice).cast(),
            len: slice.len() as u64,
            shape: None,
            dtype: T::DTYPE,
            device: Device::Cpu,
            memory: Memory::Read,
            loan: PhantomData,
        }
    }

    /// A buffer over the caller's memory, for reading and writing.
    #[inline]
    pub fn from_mut<T: Element>(slice: &'a mut [T]) -> Self {
        let len = slice.len() as u64;
        Self {
            data: NonNull::from(slice).cast(),
            len,
            shape: None,
            dtype: T::DTYPE,
            device: Device::Cpu,
            memory: Memory::Lent,
            loan: PhantomData,
        }
    }

    /// A buffer over the same memory, with the same access, that borrows this one.
    pub fn lend(&mut self) -> Buffer<'_> {
        Buffer {
            data: self.data,
            len: self.len,
            shape: self.shape.clone(),
            dtype: self.dtype,
            device: self.device,
            memory: match &self.memory {
                Memory::Kept { owner, access } => Memory::Kept {
                    owner: owner.clone(),
                    access: *access,
                },
                Memory::Read => Memory::Read,
                Memory::Lent | Memory::Owned { .. } => Memory::Lent,
            },
            loan: PhantomData,
        }
    }

    /// The same elements seen as an n-dimensional array in row-major order.
    ///
    /// # Errors
    /// `InvalidArgument` if the shape has another number of elements.
    pub fn with_shape(mut self, shape: &[u64]) -> Result<Self> {
        let elements = shape
            .iter()
            .try_fold(1u64, |product, &n| product.checked_mul(n));
        if elements != Some(self.len) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("shape {shape:?} does not hold {} elements", self.len),
            ));
        }
        self.shape = Some(shape.into());
        Ok(self)
    }

    /// The number of elements.
    #[inline]
    pub fn len(&self) -> usize {
        // Lossless: every constructor takes the length from a `usize`.
        self.len as usize
    }

    /// Whether there are no elements.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The shape; one dimension unless set by [`with_shape`](Self::with_shape).
    #[inline]
    pub fn shape(&self) -> &[u64] {
        match &self.shape {
            Some(shape) => shape,
            None => std::slice::from_ref(&self.len),
        }
    }

    /// The size of all elements in bytes.
    #[inline]
    pub fn size_bytes(&self) -> usize {
        self.len() * element_size(self.dtype)
    }

    /// The type of the elements.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device on which the memory is.
    #[inline]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether an operation may write to the memory.
    pub fn is_writable(&self) -> bool {
        match &self.memory {
            Memory::Read => false,
            Memory::Lent | Memory::Owned { .. } => true,
            Memory::Kept { access, .. } => *access == Access::Write,
        }
    }

    /// Whether the memory is borrowed from a caller.
    pub fn is_lent(&self) -> bool {
        matches!(self.memory, Memory::Read | Memory::Lent)
    }

    /// The owner that keeps foreign memory alive; `None` for lent and owned memory.
    pub fn owner(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        match &self.memory {
            Memory::Kept { owner, .. } => Some(owner),
            _ => None,
        }
    }

    /// The address, on the buffer's device.
    pub fn as_ptr(&self) -> *const u8 {
        self.data.as_ptr()
    }

    /// The address for writing, on the buffer's device.
    ///
    /// # Errors
    /// `InvalidArgument` if the memory may only be read.
    pub fn as_mut_ptr(&mut self) -> Result<*mut u8> {
        self.check_writable()?;
        Ok(self.data.as_ptr())
    }

    /// The elements as bytes, in the byte order of this machine.
    ///
    /// # Errors
    /// `InvalidArgument` if the memory is not the host's.
    #[inline]
    pub fn as_bytes(&self) -> Result<&[u8]> {
        self.check_host()?;
        // SAFETY: `data` is not null and valid for `size_bytes` bytes of initialized host memory (checked) as long
        // as `self` lives: a loan outlives it, an owned vector is freed by it, and the caller of `from_raw`
        // guarantees it for foreign memory, whose size fits in `isize`. The bytes do not change while the slice
        // lives: writing needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.size_bytes()) })
    }

    /// The elements as bytes, for writing, in the byte order of this machine.
    ///
    /// Any byte may be written to an owned `Bool` element: [`into_vec`](Self::into_vec) and
    /// [`as_mut_slice`](Self::as_mut_slice) turn every byte that is not 0 into true.
    ///
    /// # Errors
    /// `InvalidArgument` if the memory is not the host's, or may only be read; or if it is a loan of
    /// `bool`s, which may hold no other bytes ([`as_mut_slice`](Self::as_mut_slice) works for these).
    pub fn as_bytes_mut(&mut self) -> Result<&mut [u8]> {
        if self.dtype == DType::Bool && matches!(self.memory, Memory::Lent) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{self:?} is lent: it can be written as `bool`s, not as bytes"),
            ));
        }
        // SAFETY: this is not a loan of `bool`s (checked), so no lender can see other bytes than 0 and 1; an
        // owned vector is normalized before `into_vec` or `as_mut_slice` return it.
        unsafe { self.bytes_to_fill() }
    }

    /// Like [`as_bytes_mut`](Self::as_bytes_mut), but also for a loan of `bool`s. For backends.
    ///
    /// # Errors
    /// Those of [`as_bytes_mut`](Self::as_bytes_mut), except that a loan of `bool`s is accepted.
    ///
    /// # Safety
    /// After other bytes than 0 and 1 were written to a loan of `bool`s, the buffer is dropped, or
    /// [`fill`](Self::fill)ed, before the lender uses its memory again.
    #[inline]
    pub unsafe fn bytes_to_fill(&mut self) -> Result<&mut [u8]> {
        self.check_host()?;
        self.check_writable()?;
        // SAFETY: `data` is valid for `size_bytes` bytes of initialized host memory as long as `self` lives
        // (as in `as_bytes`), and no other code has access to them: lent and owned memory is this buffer's
        // alone, and so is foreign memory with `Access::Write`, by the contract of `from_raw`. Every bit
        // pattern is a value of every element type but `bool`. The caller normalizes loans of `bool`s, owned
        // vectors are normalized before they are returned, and `as_slice` checks foreign memory.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.size_bytes()) })
    }

    /// Lets `write` write the elements as bytes of any value. Afterwards `Bool` elements of lent and owned
    /// memory are normalized: every byte that is not 0 becomes 1.
    ///
    /// # Errors
    /// Those of [`bytes_to_fill`](Self::bytes_to_fill), and those of `write`.
    pub fn fill(&mut self, write: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        struct NormalizeOnDrop<'b, 'a>(&'b mut Buffer<'a>);
        impl Drop for NormalizeOnDrop<'_, '_> {
            fn drop(&mut self) {
                self.0.normalize_bools();
            }
        }
        let normalized = NormalizeOnDrop(self);
        // SAFETY: `NormalizeOnDrop` makes every byte of a `bool` 0 or 1, when this returns as well as when
        // `write` panics.
        write(unsafe { normalized.0.bytes_to_fill()? })
    }

    /// The elements. `None` if they are not of type `T`, not on the host or not aligned, or if a `Bool` byte is
    /// neither 0 nor 1.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        if self.dtype != T::DTYPE || self.check_host().is_err() {
            return None;
        }
        if self.dtype == DType::Bool && self.as_bytes().ok()?.iter().any(|&byte| byte > 1) {
            return None;
        }
        let data = self.data.cast::<T>();
        if !data.is_aligned() {
            return None;
        }
        // SAFETY: `DType` and `Element` are one to one, so this is `len` values of `T`, initialized and aligned
        // (checked: foreign memory may not be), valid values of `bool` (checked), and not written while `&self`
        // lives.
        Some(unsafe { std::slice::from_raw_parts(data.as_ptr(), self.len()) })
    }

    /// The elements for writing. `None` where [`as_slice`](Self::as_slice) returns `None` once `Bool` elements of
    /// lent and owned memory are normalized, and if the memory may only be read.
    pub fn as_mut_slice<T: Element>(&mut self) -> Option<&mut [T]> {
        self.normalize_bools();
        if !self.is_writable() {
            return None;
        }
        let len = self.as_slice::<T>()?.len();
        // SAFETY: `as_slice` has checked type, host, alignment and the values of `bool`s, of which `len`
        // lie here. The memory is writable (checked), and `&mut self` makes this the only access for the
        // slice's life.
        Some(unsafe { std::slice::from_raw_parts_mut(self.data.cast::<T>().as_ptr(), len) })
    }

    /// A copy that owns its memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the memory is not the host's, or the copy cannot be allocated.
    pub fn to_owned(&self) -> Result<Buffer<'static>> {
        let bytes = self.as_bytes()?;
        let mut copy = Buffer::zeroed(self.dtype, self.len())?;
        copy.shape = self.shape.clone();
        copy.as_bytes_mut()?.copy_from_slice(bytes);
        Ok(copy)
    }

    /// Overwrites the elements with those of `other`.
    ///
    /// # Errors
    /// `InvalidArgument` if type or length differ, if either memory is not the host's, or if this buffer may only
    /// be read.
    pub fn copy_from(&mut self, other: &Buffer<'_>) -> Result<()> {
        if self.dtype != other.dtype || self.len != other.len {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{other:?} does not fit into {self:?}"),
            ));
        }
        let bytes = other.as_bytes()?;
        self.fill(|target| {
            target.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Another buffer over the same foreign memory on a device, which also holds the owner; `None` for lent and
    /// owned memory and on the host.
    ///
    /// This is for backends whose device may still work on memory after the loan of this buffer has ended. On
    /// the host, a second buffer could write to the same memory unnoticed.
    pub fn share_owner(&self) -> Option<Buffer<'static>> {
        match &self.memory {
            Memory::Kept { owner, access } if self.device.kind() != DeviceKind::Cpu => {
                Some(Buffer {
                    data: self.data,
                    len: self.len,
                    shape: self.shape.clone(),
                    dtype: self.dtype,
                    device: self.device,
                    memory: Memory::Kept {
                        owner: owner.clone(),
                        access: *access,
                    },
                    loan: PhantomData,
                })
            }
            _ => None,
        }
    }

    /// Forgets the buffer: its memory is not freed, its owner not released, and lent `bool`s are not normalized.
    ///
    /// This is for backends that cannot prove that a device no longer uses the memory: a leak is better than
    /// corruption.
    pub fn leak(self) {
        std::mem::forget(self);
    }

    #[inline]
    fn check_host(&self) -> Result<()> {
        match self.device {
            Device::Cpu => Ok(()),
            Device::Cuda(_) => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{self:?} is not in host memory"),
            )),
        }
    }

    #[inline]
    fn check_writable(&self) -> Result<()> {
        if self.is_writable() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("{self:?} may only be read"),
        ))
    }

    /// Makes every byte of lent or owned `Bool` elements 0 or 1, since a `bool` of another value is undefined
    /// behavior. Foreign memory and memory that may only be read are left as they are.
    #[inline]
    fn normalize_bools(&mut self) {
        let is_lent_or_owned = matches!(self.memory, Memory::Lent | Memory::Owned { .. });
        if self.dtype != DType::Bool || !is_lent_or_owned {
            return;
        }
        // SAFETY: only 0 and 1 are written, so that a loan of `bool`s holds values that its lender may see.
        if let Ok(bytes) = unsafe { self.bytes_to_fill() } {
            for byte in bytes {
                *byte = u8::from(*byte != 0);
            }
        }
    }
}

impl Buffer<'static> {
    /// Takes ownership of the vector; [`into_vec`](Self::into_vec) returns it. Nothing is copied.
    pub fn from_vec<T: Element>(vec: Vec<T>) -> Self {
        let mut vec = ManuallyDrop::new(vec);
        // The pointer is not taken from a slice: a slice's pointer must not be used for the capacity beyond the
        // slice.
        let data = NonNull::new(vec.as_mut_ptr()).map_or_else(NonNull::dangling, NonNull::cast);
        Self {
            data,
            len: vec.len() as u64,
            shape: None,
            dtype: T::DTYPE,
            device: Device::Cpu,
            memory: Memory::Owned {
                capacity: vec.capacity(),
                free: free::<T>,
            },
            loan: PhantomData,
        }
    }

    /// Owned memory of this type, all zero.
    ///
    /// # Errors
    /// `InvalidArgument` for [`DType::Other`], which has no size, and if the memory cannot be allocated.
    pub fn zeroed(dtype: DType, len: usize) -> Result<Self> {
        crate::op::element::zeroed(dtype, len)
    }

    /// Foreign memory: `len` elements of `dtype` at `data` on `device`.
    ///
    /// # Safety
    /// * `data` is valid for `len` elements on `device` as long as `owner` is alive, and the buffer keeps it
    ///   alive; on the host, the bytes are initialized.
    /// * On the host, nothing else writes to the memory as long as the buffer lives, and with [`Access::Write`]
    ///   nothing else reads it either. On a device, enqueued work is ordered so that the same holds.
    ///
    /// # Errors
    /// `InvalidArgument` for [`DType::Other`], or if the size in bytes does not fit in `isize`.
    pub unsafe fn from_raw(
        data: NonNull<u8>,
        len: usize,
        dtype: DType,
        device: Device,
        access: Access,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let refuse = |message| Err(Error::new(ErrorKind::InvalidArgument, message));
        let Some(size) = dtype.size() else {
            return refuse(format!(
                "the size of an element of type {dtype} is not known"
            ));
        };
        let bytes = size.checked_mul(len);
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return refuse(format!(
                "{len} elements of type {dtype} do not fit in memory"
            ));
        }
        Ok(Self {
            data,
            len: len as u64,
            shape: None,
            dtype,
            device,
            memory: Memory::Kept { owner, access },
            loan: PhantomData,
        })
    }

    /// The vector that the buffer was made from, without copying; or, as the error, the buffer itself if it was
    /// not made from a `Vec<T>`.
    pub fn into_vec<T: Element>(mut self) -> Result<Vec<T>, Self> {
        let Memory::Owned { capacity, .. } = self.memory else {
            return Err(self);
        };
        if self.dtype != T::DTYPE {
            return Err(self);
        }
        self.normalize_bools();
        let mut this = ManuallyDrop::new(self);
        drop(this.shape.take());
        // SAFETY: `Memory::Owned` is only made in `from_vec`, from a `Vec<T>` with this `DTYPE`, of which
        // there is one type. `data`, `len` and `capacity` are its parts, the elements are valid
        // (`normalize_bools`), and `this` is never dropped, so they are not freed twice.
        Ok(unsafe { Vec::from_raw_parts(this.data.cast::<T>().as_ptr(), this.len(), capacity) })
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // A lender gets valid values back, whatever a backend has written.
        self.normalize_bools();
        if let Memory::Owned { capacity, free } = self.memory {
            // SAFETY: `data` and `capacity` are parts of the vector whose type chose `free`. This buffer
            // owns them, and is dropped once; `into_vec` prevents that where it gives them away.
            unsafe { free(self.data, capacity) }
        }
    }
}

/// Frees the memory of a `Vec<T>`.
///
/// # Safety
/// `data` and `capacity` come from a `Vec<T>` that is not freed elsewhere.
unsafe fn free<T: Element>(data: NonNull<u8>, capacity: usize) {
    // SAFETY: the caller passes the parts of a `Vec<T>` that is freed here alone. Elements need no drop, so
    // a length of 0 serves.
    drop(unsafe { Vec::from_raw_parts(data.cast::<T>().as_ptr(), 0, capacity) });
}

/// The size of one element in bytes; 0 for [`DType::Other`], which no buffer has.
#[inline]
pub const fn element_size(dtype: DType) -> usize {
    match dtype.size() {
        Some(size) => size,
        None => 0,
    }
}

impl<T: Element> From<Vec<T>> for Buffer<'static> {
    fn from(vec: Vec<T>) -> Self {
        Self::from_vec(vec)
    }
}

impl<'a, T: Element> From<&'a [T]> for Buffer<'a> {
    fn from(slice: &'a [T]) -> Self {
        Self::from_slice(slice)
    }
}

impl<'a, T: Element> From<&'a mut [T]> for Buffer<'a> {
    fn from(slice: &'a mut [T]) -> Self {
        Self::from_mut(slice)
    }
}

impl fmt::Debug for Buffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape())?;
        if self.device.kind() != DeviceKind::Cpu {
            write!(f, " on {}", self.device.kind())?;
        }
        Ok(())
    }
}

package driver

// DriverOf is what Open does with a library that it found.
var DriverOf = driverOf

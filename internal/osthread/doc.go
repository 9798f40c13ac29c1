// Package osthread tells OS threads apart.
package osthread

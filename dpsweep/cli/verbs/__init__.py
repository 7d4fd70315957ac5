"""What each verb does, in a module that is named after it or after what several share."""
